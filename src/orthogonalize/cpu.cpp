#include <algorithm>
#include <utility>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>

#include "orthogonalize/iteration.h"

namespace muon::detail {
namespace {

// Blocks of a symmetric product: fewer than this and a product runs at a lower
// rate, more and less of the upper triangle is saved.
constexpr std::int64_t kMinBlock = 128;
constexpr std::int64_t kMaxBlocks = 4;

constexpr std::int64_t kMirrorTile = 64;

// data[j, i] = data[i, j] for a tile of the lower triangle. By way of a small
// array, so that memory is read and written along rows.
template <typename T>
void mirror_tile(T* data, std::int64_t n, std::int64_t i0, std::int64_t j0) {
  T tile[kMirrorTile][kMirrorTile];
  const std::int64_t rows = std::min(kMirrorTile, n - i0);
  const std::int64_t cols = std::min(kMirrorTile, n - j0);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      tile[j][i] = data[(i0 + i) * n + j0 + j];
    }
  }
  for (std::int64_t j = 0; j < cols; ++j) {
    const std::int64_t first = std::max<std::int64_t>(0, j0 + j - i0);
    for (std::int64_t i = first; i < rows; ++i) {
      data[(j0 + j) * n + i0 + i] = tile[j][i];
    }
  }
}

// The upper triangle from the lower one. Exactly symmetric, or products of
// matrices that are symmetric in some blocks only would grow their asymmetry.
void mirror_lower_(at::Tensor& out) {
  const std::int64_t n = out.size(0);
  const std::int64_t tiles = (n + kMirrorTile - 1) / kMirrorTile;
  AT_DISPATCH_FLOATING_TYPES(out.scalar_type(), "muon_mirror_lower", [&] {
    auto* data = out.mutable_data_ptr<scalar_t>();
    const auto mirror_tiles_of_row = [&](std::int64_t i) {
      for (std::int64_t j = 0; j <= i; ++j) {
        mirror_tile(data, n, i * kMirrorTile, j * kMirrorTile);
      }
    };
    // A short row of tiles goes with a long one: equal work for every thread.
    at::parallel_for(0, (tiles + 1) / 2, 2, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        mirror_tiles_of_row(i);
        if (tiles - 1 - i != i) {
          mirror_tiles_of_row(tiles - 1 - i);
        }
      }
    });
  });
}

// Symmetric results are computed block row by block row up to the diagonal and
// mirrored: torch's CPU library has no syrk.
class SymmetricProduct {
 public:
  explicit SymmetricProduct(std::int64_t n)
      : n_(n), block_(std::max(kMinBlock, (n + kMaxBlocks - 1) / kMaxBlocks)) {}

  // out = alpha x y (+ beta c), x and y with n rows and columns on the outside.
  void compute(
      at::Tensor& out, const at::Tensor& x, const at::Tensor& y, const at::Tensor& c, double beta,
      double alpha) const {
    for (std::int64_t first = 0; first < n_; first += block_) {
      const std::int64_t height = std::min(block_, n_ - first);
      const std::int64_t width = first + height;
      at::Tensor target = out.narrow(0, first, height).narrow(1, 0, width);
      const at::Tensor left = x.narrow(0, first, height);
      const at::Tensor right = y.narrow(1, 0, width);
      if (c.defined()) {
        at::addmm_out(
            target, c.narrow(0, first, height).narrow(1, 0, width), left, right, beta, alpha);
      } else {
        at::mm_out(target, left, right);
      }
    }
    mirror_lower_(out);
  }

 private:
  std::int64_t n_;
  std::int64_t block_;
};

// One matrix and the workspace of its iteration. A run without restart
// multiplies the rounding errors of its square matrices, which are therefore
// held in float64.
class MatrixIteration {
 public:
  MatrixIteration(const at::Tensor& like, Form form, std::int64_t rows, std::int64_t cols)
      : is_tall_(rows > cols),
        n_(std::min(rows, cols)),
        symmetric_(n_),
        r_(at::empty(
            {n_, n_}, form == Form::Gram ? like.options().dtype(at::kDouble) : like.options())),
        z_(at::empty_like(r_)),
        w_(at::empty_like(r_)),
        q_(at::empty_like(r_)),
        next_q_(at::empty_like(r_)),
        next_x_(at::empty({rows, cols}, like.options())) {}

  void run(const at::Tensor& matrix, const Iteration& iteration) {
    const at::ArrayRef<Coefficients> steps(iteration.coefficients);
    at::Tensor x = matrix;
    std::size_t first = 0;
    for (const std::size_t length : run_lengths(iteration.form, steps.size())) {
      run_steps(x, steps.slice(first, length));
      first += length;
    }
    if (!x.is_same(matrix)) {
      matrix.copy_(x);
      next_x_ = std::move(x);
    }
  }

 private:
  void gram(const at::Tensor& x) {
    const at::Tensor wide = (is_tall_ ? x.t() : x).to(r_.scalar_type());
    symmetric_.compute(r_, wide, wide.t(), {}, 0.0, 1.0);
  }

  // x <- q x with q the product of the steps' polynomials. All square matrices
  // here are polynomials in the first r: they commute, and their products are
  // symmetric.
  void run_steps(at::Tensor& x, at::ArrayRef<Coefficients> steps) {
    gram(x);
    for (std::size_t k = 0; k < steps.size(); ++k) {
      const auto& [a, b, c] = steps[k];
      symmetric_.compute(z_, r_, r_, r_, b, c);
      if (k + 1 < steps.size()) {
        symmetric_.compute(w_, r_, z_, r_, a, 1.0);
        symmetric_.compute(r_, w_, z_, w_, a, 1.0);
      }
      if (k == 0) {
        std::swap(q_, z_);
        q_.diagonal().add_(a);
      } else {
        symmetric_.compute(next_q_, q_, z_, q_, a, 1.0);
        std::swap(q_, next_q_);
      }
    }
    const at::Tensor q = q_.to(x.scalar_type());
    at::mm_out(next_x_, is_tall_ ? x : q, is_tall_ ? q : x);
    std::swap(x, next_x_);
  }

  bool is_tall_;
  std::int64_t n_;
  SymmetricProduct symmetric_;
  at::Tensor r_;
  at::Tensor z_;
  at::Tensor w_;
  at::Tensor q_;
  at::Tensor next_q_;
  at::Tensor next_x_;
};

} // namespace

void iterate_cpu_(at::Tensor matrices, const Iteration& iteration) {
  if (iteration.form != Form::Gram && is_small(std::min(matrices.size(1), matrices.size(2)))) {
    iterate_small_(matrices, iteration);
    return;
  }
  MatrixIteration one(matrices, iteration.form, matrices.size(1), matrices.size(2));
  for (std::int64_t i = 0; i < matrices.size(0); ++i) {
    one.run(matrices.select(0, i), iteration);
  }
}

} // namespace muon::detail
