#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <muon/optimizer.h>

namespace muon::testing {

/// A leaf that requires a gradient, with normal entries (see random_tensor).
at::Tensor parameter(
    c10::IntArrayRef sizes, std::uint64_t salt = 0, c10::ScalarType dtype = c10::kFloat);

/// Leaves of the same values, with gradients of their own.
std::vector<at::Tensor> clone_parameters(const std::vector<at::Tensor>& params);

/// Gives each parameter random gradients that follow from `salt`.
void set_gradients(const std::vector<at::Tensor>& params, std::uint64_t salt);

/// Copies without a gradient history, to compare with later.
std::vector<at::Tensor> snapshot(const std::vector<at::Tensor>& tensors);

/// A group; options not given inherit from the optimizer's defaults.
torch::optim::OptimizerParamGroup group(std::vector<at::Tensor> params, const MuonOptions& options);

/// The parameters of all groups, in order.
std::vector<at::Tensor> parameters_of(const Muon& optimizer);

/// A state tensor of a parameter; undefined if there is none.
at::Tensor state_of(const Muon& optimizer, const at::Tensor& param, const std::string& key);

/// Through torch::save and torch::load.
std::string save(const Muon& optimizer);
void load(Muon& optimizer, const std::string& bytes);

/// Same sizes, dtype and bits (NaNs included).
::testing::AssertionResult bit_equal(const at::Tensor& a, const at::Tensor& b);
::testing::AssertionResult bit_equal(
    const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

/// Every parameter and every state tensor of both.
::testing::AssertionResult same_bits(const Muon& a, const Muon& b);

/// What `call` throws; fails the test if that is not an `Error`.
template <typename Error, typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another type of error: " << error.what();
    return "";
  }
  ADD_FAILURE() << "no error";
  return "";
}

/// Whether `text` contains all parts.
::testing::AssertionResult mentions(
    const std::string& text, std::initializer_list<std::string> parts);

} // namespace muon::testing
