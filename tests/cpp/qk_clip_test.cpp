// QK-clip through C++: the same rules as in Python, and what is refused.

#include <cmath>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <muon/qk_clip.h>

#include "support/optimizers.h"

namespace muon::testing {
namespace {

TEST(QkClip, H9_heads_above_the_threshold_shrink_by_the_root_in_both_projections) {
  at::Tensor query = at::ones({4, 3}), key = at::ones({4, 3});
  const at::Tensor gamma = qk_clip_(query, key, at::tensor({50.0F, 400.0F}));
  EXPECT_TRUE(at::equal(gamma, at::tensor({1.0F, 0.25F})));
  const at::Tensor expected = at::tensor({1.0F, 1.0F, 0.5F, 0.5F}).unsqueeze(1).expand({4, 3});
  EXPECT_TRUE(at::equal(query, expected));
  EXPECT_TRUE(at::equal(key, expected));
}

TEST(QkClip, H9_shared_keys_stay_and_a_transposed_weight_is_scaled_along_its_dim) {
  at::Tensor query = at::ones({3, 4}), key = at::ones({3, 2});
  QkClipOptions options;
  options.threshold = 10.0;
  options.num_key_heads = 1;
  options.dim = 1;
  qk_clip_(query, key, at::full({1, 2, 5, 5}, 40.0), options);
  EXPECT_TRUE(at::equal(query, at::full({3, 4}, 0.25)));
  EXPECT_TRUE(at::equal(key, at::ones({3, 2})));
}

TEST(QkClip, H9_wrong_options_leave_the_weights_alone) {
  at::Tensor query = at::ones({4, 3}), key = at::ones({4, 3});
  const at::Tensor logits = at::full({2}, 400.0);
  const auto refused = [&](const QkClipOptions& options, const std::string& part) {
    const auto call = [&] { qk_clip_(query, key, logits, options); };
    EXPECT_TRUE(mentions(message_of<c10::ValueError>(call), {part}));
    EXPECT_TRUE(at::equal(query, at::ones({4, 3})));
    EXPECT_TRUE(at::equal(key, at::ones({4, 3})));
  };
  refused({.threshold = 0.0}, "threshold > 0, got 0");
  refused({.threshold = std::nan("")}, "threshold > 0, got nan");
  refused({.balance = 2.0}, "balance in [0, 1], got 2");
  refused({.num_key_heads = 3}, "divide the 2 query heads, got 3");
  refused({.dim = 1}, "the 3 entries of dim 1 of query to divide into 2 heads");
}

} // namespace
} // namespace muon::testing
