#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <muon/export.h>

namespace muon {

/// How `qk_clip_` reads the projections.
struct MUON_API QkClipOptions {
  double threshold = 100.0; ///< tau, the largest logit that is left alone
  std::int64_t num_key_heads = 0; ///< 0: as many as query heads
  double balance = 0.5; ///< alpha: queries take gamma^alpha, keys the rest
  std::int64_t dim = 0; ///< dim of the weights that holds heads x head size
};

/// QK-clip of MuonClip (Kimi K2, arXiv 2507.20534): keeps attention logits from
/// growing. Head h with largest logit S_h > tau has gamma_h = tau / S_h, others
/// gamma_h = 1; its query rows are multiplied by gamma_h^alpha and its key rows
/// by gamma_h^(1 - alpha), so that its logits shrink by gamma_h. Keys that
/// several query heads share are left alone: the queries take all of gamma_h.
///
/// `query` and `key` are the projections' weights (or biases), or views of a
/// fused one, of any strides; they are changed in place, after any step of any
/// optimizer. `logits` are one maximum a head [heads], or attention logits
/// [..., heads, queries, keys] as the softmax takes them, masked by -inf. A NaN
/// or +inf maximum clips nothing: it says nothing about the weights.
///
/// Returns gamma, float32 [heads] on the device of `logits`; nothing is read on
/// the host. ValueError for heads that do not divide the weights, for a
/// threshold <= 0 and for a balance outside [0, 1], before anything changes.
MUON_API at::Tensor qk_clip_(
    at::Tensor query, at::Tensor key, const at::Tensor& logits, const QkClipOptions& options = {});

} // namespace muon
