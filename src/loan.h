#pragma once

#include <string>
#include <vector>

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include "matrix/region.h"

namespace muon::detail {

/// Whether a stage is one of libmuon's.
inline bool is_own_stage(const std::string& op) {
  return op.starts_with("muon::");
}

/// Whose tensors a stage gets: the parameter's name, and where its matrices
/// are (null: the whole parameter, in its own dims).
struct Borrowed {
  const std::string* name;
  const Region* region;
  bool may_move = false; // the caller's own tensors may get other memory, views may not
};

/// The tensors that one call of a stage gets. libmuon's own stages take views in
/// the dims of the parameter; a stage of somebody else's gets matrices [batch,
/// rows, cols], complex where the matrices are: a view where there is one, a
/// copy that is written back otherwise.
class Loan {
 public:
  Loan(const std::string& op, const std::vector<Borrowed>& pieces);

  /// Whether the stage is libmuon's own.
  bool is_own() const {
    return is_own_;
  }

  /// What the stage gets for `tensors`: one a piece, or several, piece by piece.
  std::vector<at::Tensor> read(const std::vector<at::Tensor>& tensors);
  std::vector<at::Tensor> write(const std::vector<at::Tensor>& tensors);

  /// Writes copies back. RuntimeError naming the stage and the parameter where a
  /// tensor has lost the shape or the memory that it was lent with.
  void take_back();

 private:
  struct Lent {
    std::size_t piece;
    at::Tensor stored; // undefined unless `given` is a copy to write back
    at::Tensor given;
    at::DimVector sizes, strides;
    const void* data;
    c10::ScalarType dtype;
  };

  std::vector<at::Tensor> lend(const std::vector<at::Tensor>& tensors, bool is_written);
  void check(const Lent& lent) const;

  const std::string& op_;
  const std::vector<Borrowed>& pieces_;
  bool is_own_;
  std::vector<Lent> lent_;
};

} // namespace muon::detail
