#pragma once

#include <unordered_set>
#include <vector>

#include <muon/optimizer.h>

namespace muon::detail {

/// The group's options as the caller wrote them; none given where it has none.
/// TypeError for the options of another optimizer.
const MuonOptions& own_options(const torch::optim::OptimizerParamGroup& group, std::size_t index);

/// Checks what any algorithm asks of parameters: defined dense floating-point
/// or complex leaves, each of them new to `seen`, and notes that match them.
void check_params(
    const std::vector<at::Tensor>& params, const MuonOptions& options, std::size_t group,
    std::unordered_set<const at::TensorImpl*>& seen);

/// Checks that the parameters of matrix groups are matrices. Those that no
/// option turns into matrices are collected, so that one error names them all.
class MatrixCheck {
 public:
  void add(const std::vector<at::Tensor>& params, const MuonOptions& options, std::size_t group);
  /// Throws if there were any.
  void finish() const;

 private:
  std::string offenders_;
  std::string first_size_;
  bool too_many_dims_ = false;
  bool too_few_dims_ = false;
};

/// Whether the group's algorithm works on elements (Adam) and not on matrices.
bool is_elementwise(const MuonOptions& options);

} // namespace muon::detail
