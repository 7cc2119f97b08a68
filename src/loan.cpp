#include "loan.h"

#include <algorithm>
#include <utility>

#include <ATen/TensorUtils.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

namespace muon::detail {
namespace {

// [batch, rows, cols, (2)] over the same storage where it has such a view.
at::Tensor as_matrices(const at::Tensor& stored, const Region& region) {
  at::DimVector sizes{stored.size(0), region.shape.rows, region.shape.cols};
  if (region.is_complex) {
    sizes.push_back(2);
  }
  return stored.sizes() == at::IntArrayRef(sizes) ? stored : stored.reshape(sizes);
}

bool has_complex_view(const at::Tensor& real) {
  const auto outer = real.strides().slice(0, static_cast<std::size_t>(real.dim()) - 1);
  return (real.scalar_type() == at::kFloat || real.scalar_type() == at::kDouble) &&
      real.strides().back() == 1 && real.storage_offset() % 2 == 0 &&
      std::all_of(outer.begin(), outer.end(), [](std::int64_t stride) { return stride % 2 == 0; });
}

at::Tensor as_complex(const at::Tensor& real) {
  if (has_complex_view(real)) {
    return at::view_as_complex(real);
  }
  const auto dtype = real.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::view_as_complex(real.to(dtype).clone(at::MemoryFormat::Contiguous));
}

// What a stage of somebody else's gets for a view in the dims of its parameter.
at::Tensor given_for(const at::Tensor& stored, const Region* region) {
  const bool is_matrices = region != nullptr && stored.dim() > 0 &&
      stored.numel() ==
          stored.size(0) * region->shape.rows * region->shape.cols * (region->is_complex ? 2 : 1);
  if (!is_matrices || stored.is_complex()) {
    return stored;
  }
  const at::Tensor matrices = as_matrices(stored, *region);
  return region->is_complex ? as_complex(matrices) : matrices;
}

} // namespace

Loan::Loan(const std::string& op, const std::vector<Borrowed>& pieces)
    : op_(op), pieces_(pieces), is_own_(is_own_stage(op)) {}

std::vector<at::Tensor> Loan::read(const std::vector<at::Tensor>& tensors) {
  return lend(tensors, false);
}

std::vector<at::Tensor> Loan::write(const std::vector<at::Tensor>& tensors) {
  return lend(tensors, true);
}

std::vector<at::Tensor> Loan::lend(const std::vector<at::Tensor>& tensors, bool is_written) {
  if (is_own_) {
    return tensors;
  }
  std::vector<at::Tensor> result;
  // The workspace as a whole is one tensor for all pieces.
  const std::size_t slots = std::max<std::size_t>(1, tensors.size() / pieces_.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& stored = tensors[i];
    const std::size_t piece = i / slots;
    const at::Tensor given = given_for(stored, pieces_[piece].region);
    const bool is_copy = !given.is_alias_of(stored);
    lent_.push_back(
        {piece, is_copy && is_written ? stored : at::Tensor(), given,
         at::DimVector(given.sizes().begin(), given.sizes().end()),
         at::DimVector(given.strides().begin(), given.strides().end()), given.const_data_ptr(),
         given.scalar_type()});
    result.push_back(given);
  }
  return result;
}

void Loan::check(const Lent& lent) const {
  TORCH_CHECK(
      lent.given.sizes() == at::IntArrayRef(lent.sizes) && lent.given.scalar_type() == lent.dtype &&
          (pieces_[lent.piece].may_move ||
           (lent.given.strides() == at::IntArrayRef(lent.strides) &&
            lent.given.const_data_ptr() == lent.data)),
      "muon: expected ", op_, " to leave its tensors where they are, but one of ", lent.dtype, " ",
      at::IntArrayRef(lent.sizes), " is now ", lent.given.scalar_type(), " ", lent.given.sizes(),
      " with strides ", lent.given.strides(),
      lent.given.const_data_ptr() == lent.data ? "" : " in other memory", " (",
      *pieces_[lent.piece].name, "); write into it, as copy_() does");
}

void Loan::take_back() {
  for (const Lent& lent : lent_) {
    check(lent);
  }
  for (const Lent& lent : lent_) {
    if (lent.stored.defined()) {
      const at::Tensor real = lent.given.is_complex() ? at::view_as_real(lent.given) : lent.given;
      lent.stored.copy_(real.view(lent.stored.sizes()));
    }
  }
}

} // namespace muon::detail
