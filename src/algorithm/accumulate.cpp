#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>

#include "algorithm/hyper.h"
#include "algorithm/piece_loop.h"
#include "algorithm/stages.h"
#include "state/block_rows.h"
#include "state/quantized.h"
#include "target_clones.h"

namespace muon::detail {
namespace {

template <typename T>
MUON_ALWAYS_INLINE void momentum_body(
    const T* __restrict g, T* __restrict b, T* __restrict q, std::int64_t n, T factor, T keep,
    T blend, T look, T add) {
  for (std::int64_t i = 0; i < n; ++i) {
    const T grad = factor * g[i];
    const T momentum = keep * b[i] + blend * grad;
    b[i] = momentum;
    q[i] = look * momentum + add * grad;
  }
}

MUON_TARGET_CLONES void momentum_run(
    const float* g, float* b, float* q, std::int64_t n, float factor, float keep, float blend,
    float look, float add) {
  momentum_body(g, b, q, n, factor, keep, blend, look, add);
}

MUON_TARGET_CLONES void momentum_run(
    const double* g, double* b, double* q, std::int64_t n, double factor, double keep, double blend,
    double look, double add) {
  momentum_body(g, b, q, n, factor, keep, blend, look, add);
}

// b <- keep b + blend g, q = nesterov ? look b + blend g : b, with g already
// scaled: EMA has blend = 1 - momentum, heavy ball 1 (seeds: keep = look).
struct Momentum {
  double grad_factor = 1.0; // unscales, and negates to maximize
  double keep = 0.0;
  double blend = 1.0;
  bool nesterov = false;

  Momentum(const HyperRow& hyper, double inverse_scale)
      : grad_factor(hyper.flag(Hyper::kMaximize) ? -inverse_scale : inverse_scale),
        keep(hyper[Hyper::kMomentum]),
        blend(hyper.flag(Hyper::kHeavyBall) ? 1.0 : 1.0 - hyper[Hyper::kMomentum]),
        nesterov(hyper.flag(Hyper::kNesterov)) {}

  template <typename T>
  void run(const T* g, T* b, T* q, std::int64_t n) const {
    const T look = static_cast<T>(keep);
    const T add = static_cast<T>(blend);
    momentum_run(
        g, b, q, n, static_cast<T>(grad_factor), look, add, nesterov ? look : T{1},
        nesterov ? add : T{0});
  }
};

template <typename T>
void accumulate_cpu_(
    at::TensorList grads, at::TensorList state, at::TensorList matrices,
    const std::vector<Momentum>& rules) {
  std::vector<StridedRuns<3>> walks;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    walks.emplace_back(std::array<const at::Tensor*, 3>{&state[i], &grads[i], &matrices[i]});
  }
  for_each_run(walks, [&](std::size_t i, const StridedRuns<3>::Offsets& at, std::int64_t n) {
    const auto& strides = walks[i].run_strides();
    T grad_buffer[kRun];
    T momentum_buffer[kRun];
    T matrix_buffer[kRun];
    const T* g = load_run(
        grads[i].scalar_type(), grads[i].const_data_ptr(), at[1], strides[1], n, grad_buffer);
    const T* stored = load_run(
        state[i].scalar_type(), state[i].const_data_ptr(), at[0], strides[0], n, momentum_buffer);
    if (stored != momentum_buffer) {
      std::copy(stored, stored + n, momentum_buffer);
    }
    rules[i].run(g, momentum_buffer, matrix_buffer, n);
    store_run(
        state[i].scalar_type(), state[i].mutable_data_ptr(), at[0], strides[0], n, momentum_buffer);
    store_run(
        matrices[i].scalar_type(), matrices[i].mutable_data_ptr(), at[2], strides[2], n,
        matrix_buffer);
  });
}

void accumulate_any_(
    at::TensorList grads, at::TensorList state, at::TensorList matrices,
    const std::vector<Momentum>& rules) {
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const Momentum& rule = rules[i];
    const at::Tensor grad = grads[i].to(matrices[i].scalar_type()) * rule.grad_factor;
    const at::Tensor momentum = state[i].to(grad.scalar_type()) * rule.keep + grad * rule.blend;
    state[i].copy_(momentum);
    matrices[i].copy_(rule.nesterov ? momentum * rule.keep + grad * rule.blend : momentum);
  }
}

// The same on codes and scales, two tensors a piece in `state`; all in block order.
template <typename T>
void accumulate_blocks_cpu_(
    at::TensorList grads, const std::vector<BlockState>& state, at::TensorList matrices,
    const std::vector<Momentum>& rules) {
  std::vector<BlockRows> rows;
  std::vector<BlockCodec> codecs;
  std::vector<ValueRuns> grad_runs, matrix_runs;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    rows.emplace_back(grads[i].sizes(), state[i].scales.dim() - 1);
    codecs.emplace_back(state[i], rows.back());
    grad_runs.emplace_back(grads[i]);
    matrix_runs.emplace_back(matrices[i]);
  }
  for_each_unit(rows, [&](std::size_t i, const BlockRows::Unit& unit) {
    T grad_buffer[kRun];
    T momentum[kRun];
    T matrix[kRun];
    codecs[i].load(unit, momentum);
    const T* g = grad_runs[i].load(unit.begin, unit.length, grad_buffer);
    rules[i].run(g, momentum, matrix, unit.length);
    codecs[i].store(unit, momentum);
    matrix_runs[i].store(unit.begin, unit.length, matrix);
  });
}

void accumulate_blocks_any_(
    at::TensorList grads, const std::vector<BlockState>& state, at::TensorList matrices,
    const std::vector<Momentum>& rules) {
  std::vector<at::Tensor> decoded;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    decoded.push_back(decode_state(state[i], grads[i].sizes()));
  }
  accumulate_any_(grads, decoded, matrices, rules);
  for (std::size_t i = 0; i < grads.size(); ++i) {
    encode_state_(state[i], decoded[i]);
  }
}

} // namespace

void accumulate_(
    at::TensorList given_grads, at::TensorList given_state, at::TensorList given_matrices,
    const at::Tensor& hyper, at::IntArrayRef groups, const std::optional<at::Tensor>& grad_scale) {
  const auto grads = real_pieces(given_grads);
  const auto matrices = real_pieces(given_matrices);
  check_pieces("accumulate", matrices, {grads}, hyper, groups);
  const double inverse = inverse_scale(grad_scale);
  std::vector<Momentum> rules;
  for (const std::int64_t group : groups) {
    rules.emplace_back(HyperRow(hyper, group), inverse);
  }
  const bool is_cpu = matrices[0].is_cpu();
  if (given_state.size() == 2 * grads.size()) {
    const std::vector<BlockState> state = block_states(given_state, grads);
    if (!is_cpu) {
      accumulate_blocks_any_(grads, state, matrices, rules);
      return;
    }
    AT_DISPATCH_FLOATING_TYPES(matrices[0].scalar_type(), "muon_accumulate", [&] {
      accumulate_blocks_cpu_<scalar_t>(grads, state, matrices, rules);
    });
    return;
  }
  const auto state = real_pieces(given_state);
  check_pieces("accumulate", matrices, {state}, hyper, groups);
  if (!is_cpu) {
    accumulate_any_(grads, state, matrices, rules);
    return;
  }
  AT_DISPATCH_FLOATING_TYPES(matrices[0].scalar_type(), "muon_accumulate", [&] {
    accumulate_cpu_<scalar_t>(grads, state, matrices, rules);
  });
}

} // namespace muon::detail
