#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>

#include "algorithm/hyper.h"
#include "algorithm/piece_loop.h"
#include "algorithm/stages.h"
#include "target_clones.h"

namespace muon::detail {
namespace {

// p <- p - shrink p - rate u; cautious: the decay only where u p > 0.
struct Update {
  double rate = 0.0;
  double shrink = 0.0;
  bool cautious = false;

  Update(const HyperRow& hyper, double factor)
      : rate(hyper[Hyper::kLr] * hyper[Hyper::kLrMultiplier] * factor),
        shrink(
            (hyper.flag(Hyper::kDecayAdjusted) ? rate : hyper[Hyper::kLr]) *
            hyper[Hyper::kWeightDecay]),
        cautious(hyper.flag(Hyper::kCautious)) {}

  // A step of length zero touches nothing, not even the sign of a zero.
  bool is_identity() const {
    return rate == 0.0 && shrink == 0.0;
  }
};

template <typename T>
MUON_ALWAYS_INLINE void plain_body(
    T* __restrict p, const T* __restrict u, std::int64_t n, T keep, T rate) {
  for (std::int64_t i = 0; i < n; ++i) {
    p[i] = keep * p[i] - rate * u[i];
  }
}

template <typename T>
MUON_ALWAYS_INLINE void cautious_body(
    T* __restrict p, const T* __restrict u, std::int64_t n, T shrink, T rate) {
  for (std::int64_t i = 0; i < n; ++i) {
    const T decay = u[i] * p[i] > T{0} ? shrink * p[i] : T{0};
    p[i] = p[i] - decay - rate * u[i];
  }
}

MUON_TARGET_CLONES void plain_run(
    float* p, const float* u, std::int64_t n, float keep, float rate) {
  plain_body(p, u, n, keep, rate);
}

MUON_TARGET_CLONES void plain_run(
    double* p, const double* u, std::int64_t n, double keep, double rate) {
  plain_body(p, u, n, keep, rate);
}

MUON_TARGET_CLONES void cautious_run(
    float* p, const float* u, std::int64_t n, float shrink, float rate) {
  cautious_body(p, u, n, shrink, rate);
}

MUON_TARGET_CLONES void cautious_run(
    double* p, const double* u, std::int64_t n, double shrink, double rate) {
  cautious_body(p, u, n, shrink, rate);
}

template <typename T>
void apply_cpu_(
    at::TensorList params, at::TensorList matrices, const std::vector<Update>& updates) {
  std::vector<StridedRuns<2>> walks;
  for (std::size_t i = 0; i < params.size(); ++i) {
    walks.emplace_back(std::array<const at::Tensor*, 2>{&params[i], &matrices[i]});
  }
  for_each_run(walks, [&](std::size_t i, const StridedRuns<2>::Offsets& at, std::int64_t n) {
    const Update& update = updates[i];
    if (update.is_identity()) {
      return;
    }
    const auto& strides = walks[i].run_strides();
    T param_buffer[kRun];
    T matrix_buffer[kRun];
    const T* stored = load_run(
        params[i].scalar_type(), params[i].const_data_ptr(), at[0], strides[0], n, param_buffer);
    const T* u = load_run(
        matrices[i].scalar_type(), matrices[i].const_data_ptr(), at[1], strides[1], n,
        matrix_buffer);
    if (stored != param_buffer) {
      std::copy(stored, stored + n, param_buffer);
    }
    if (update.cautious) {
      cautious_run(param_buffer, u, n, static_cast<T>(update.shrink), static_cast<T>(update.rate));
    } else {
      plain_run(
          param_buffer, u, n, static_cast<T>(1.0 - update.shrink), static_cast<T>(update.rate));
    }
    store_run(
        params[i].scalar_type(), params[i].mutable_data_ptr(), at[0], strides[0], n, param_buffer);
  });
}

void apply_any_(
    at::TensorList params, at::TensorList matrices, const std::vector<Update>& updates) {
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Update& update = updates[i];
    if (update.is_identity()) {
      continue;
    }
    const at::Tensor& u = matrices[i];
    const at::Tensor p = params[i].to(u.scalar_type());
    const at::Tensor decay =
        update.cautious ? at::where(u * p > 0, p * update.shrink, 0.0) : p * update.shrink;
    params[i].copy_(p - decay - u * update.rate);
  }
}

} // namespace

void apply_(
    at::TensorList given_params, at::TensorList given_matrices, const at::Tensor& hyper,
    at::IntArrayRef groups, at::ArrayRef<double> factors) {
  const auto params = real_pieces(given_params);
  const auto matrices = real_pieces(given_matrices);
  check_pieces("apply", params, {matrices}, hyper, groups);
  TORCH_CHECK_VALUE(
      factors.size() == params.size(), "muon: expected a factor a piece, got ", factors.size(),
      " for ", params.size(), " pieces (apply)");
  std::vector<Update> updates;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    updates.emplace_back(HyperRow(hyper, groups[i]), factors[i]);
  }
  if (!matrices[0].is_cpu()) {
    apply_any_(params, matrices, updates);
    return;
  }
  AT_DISPATCH_FLOATING_TYPES(matrices[0].scalar_type(), "muon_apply", [&] {
    apply_cpu_<scalar_t>(params, matrices, updates);
  });
}

} // namespace muon::detail
