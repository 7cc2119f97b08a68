#include <muon/qk_clip.h>

#include <limits>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

namespace muon {
namespace {

at::Tensor largest_logits(const at::Tensor& logits) {
  TORCH_CHECK_VALUE(
      logits.is_floating_point() && (logits.dim() == 1 || logits.dim() >= 3),
      "muon: expected logits of shape [heads] or [..., heads, queries, keys], got ",
      logits.scalar_type(), " ", logits.sizes());
  if (logits.dim() == 1) {
    return logits.to(at::kFloat);
  }
  TORCH_CHECK_VALUE(
      logits.numel() > 0, "muon: expected at least one logit a head, got shape ", logits.sizes());
  std::vector<std::int64_t> others;
  for (std::int64_t dim = 0; dim < logits.dim(); ++dim) {
    if (dim != logits.dim() - 3) {
      others.push_back(dim);
    }
  }
  return logits.amax(others).to(at::kFloat);
}

// The largest and the smallest threshold that float32 logits can be divided by.
constexpr double kLargest = std::numeric_limits<float>::max();
constexpr double kSmallest = std::numeric_limits<float>::min();

void check_weight(
    const at::Tensor& weight, const char* name, std::int64_t dim, std::int64_t heads) {
  TORCH_CHECK_VALUE(
      weight.is_floating_point(), "muon: expected a floating point ", name, ", got ",
      weight.scalar_type());
  TORCH_CHECK_VALUE(
      dim >= 0 && dim < weight.dim(), "muon: expected dim to be one of ", name, " ", weight.sizes(),
      ", got ", dim);
  TORCH_CHECK_VALUE(
      heads > 0 && weight.size(dim) % heads == 0, "muon: expected the ", weight.size(dim),
      " entries of dim ", dim, " of ", name, " to divide into ", heads, " heads");
  TORCH_CHECK_VALUE(
      !weight.is_inference() || c10::InferenceMode::is_enabled(), "muon: expected a ", name,
      " that can be written, got an inference tensor; use a clone()");
  TORCH_CHECK_VALUE(
      at::has_internal_overlap(weight) != at::MemOverlap::Yes, "muon: expected a ", name,
      " whose entries have memory of their own, got strides ", weight.strides(), " for ",
      weight.sizes(), "; use a clone()");
}

void scale_heads_(const at::Tensor& weight, const at::Tensor& factors, std::int64_t dim) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(weight.dim()), 1);
  shape[static_cast<std::size_t>(dim)] = weight.size(dim);
  const at::Tensor rows =
      factors.to(weight.device()).repeat_interleave(weight.size(dim) / factors.size(0));
  // A head that is not clipped is not rounded either.
  weight.copy_(at::where(rows.view(shape) == 1, weight, weight * rows.view(shape)));
}

} // namespace

at::Tensor qk_clip_(
    at::Tensor query, at::Tensor key, const at::Tensor& logits, const QkClipOptions& options) {
  const at::NoGradGuard no_grad;
  const at::Tensor largest = largest_logits(logits.detach());
  const std::int64_t heads = largest.size(0);
  const std::int64_t key_heads = options.num_key_heads == 0 ? heads : options.num_key_heads;
  TORCH_CHECK_VALUE(
      options.threshold >= kSmallest && options.threshold <= kLargest,
      "muon: expected threshold > 0, got ", options.threshold,
      "; logits are float32: between 1.2e-38 and 3.4e38");
  TORCH_CHECK_VALUE(
      options.balance >= 0.0 && options.balance <= 1.0, "muon: expected balance in [0, 1], got ",
      options.balance);
  TORCH_CHECK_VALUE(
      key_heads > 0 && heads % key_heads == 0, "muon: expected num_key_heads to divide the ", heads,
      " query heads, got ", options.num_key_heads);
  check_weight(query, "query", options.dim, heads);
  check_weight(key, "key", options.dim, key_heads);
  TORCH_CHECK_VALUE(
      at::get_overlap_status(query, key) != at::MemOverlapStatus::Full &&
          at::get_overlap_status(query, key) != at::MemOverlapStatus::Partial,
      "muon: expected query and key in memory of their own, but they overlap");

  const at::Tensor is_clipped = (largest > options.threshold).logical_and(at::isfinite(largest));
  const at::Tensor gamma = at::where(is_clipped, options.threshold / largest, 1.0);
  const bool shares_keys = key_heads != heads;
  scale_heads_(query, gamma.pow(shares_keys ? 1.0 : options.balance), options.dim);
  if (!shares_keys) {
    scale_heads_(key, gamma.pow(1.0 - options.balance), options.dim);
  }
  return gamma;
}

} // namespace muon
