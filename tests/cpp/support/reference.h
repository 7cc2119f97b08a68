#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include <muon/orthogonalize.h>

namespace muon::testing {

/// MUON_TEST_SEED, or 0: every test's random numbers follow from it.
std::uint64_t test_seed();

/// Normal entries in float64 (complex128 if `is_complex`), a function of the sizes, `salt` and
/// the test seed.
at::Tensor random_tensor(c10::IntArrayRef sizes, bool is_complex = false, std::uint64_t salt = 0);

/// A rows x cols float64 matrix with the given singular values and random singular vectors.
at::Tensor with_spectrum(std::int64_t rows, std::int64_t cols, const at::Tensor& singular_values);

/// What `orthogonalize` computes, by its definition: U p(S / norm) V^H of the matrices in the
/// last two dims, with a scalar polynomial p, in float64 or complex128.
at::Tensor exact_orthogonalize(const at::Tensor& x, const OrthogonalizeOptions& options);

/// The largest |p'| of a schedule's polynomial, counted from any of its steps on.
double steepest_slope(const Schedule& schedule);

/// |got - expected|_F / |expected|_F in double precision; 0 for empty tensors, infinite for NaN.
double relative_error(const at::Tensor& got, const at::Tensor& expected);

/// "muon", "polar_express_paper" and so on with every other option at its default.
OrthogonalizeOptions schedule_options(const std::string& name);

} // namespace muon::testing
