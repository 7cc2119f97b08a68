#include <vector>

#include "algorithm/hyper.h"
#include "algorithm/stages.h"
#include "orthogonalize/iteration.h"

namespace muon::detail {

void orthogonalize_stage_(
    at::Tensor matrices, const at::Tensor& hyper, at::IntArrayRef groups,
    std::string_view spec_text) {
  TORCH_CHECK_VALUE(
      matrices.dim() == 3 && groups.size() == static_cast<std::size_t>(matrices.size(0)) &&
          (matrices.is_floating_point() || matrices.is_complex()),
      "muon: expected floating point matrices [count, rows, cols] and one group a matrix, got ",
      matrices.scalar_type(), " ", matrices.sizes(), " and ", groups.size(),
      " groups (orthogonalize)");
  check_groups("orthogonalize", hyper, groups);
  std::vector<double> eps;
  eps.reserve(groups.size());
  for (const std::int64_t group : groups) {
    eps.push_back(HyperRow(hyper, group)[Hyper::kEps]);
  }
  const GroupSpec spec = parse_group_spec(spec_text);
  const c10::ScalarType dtype = matrices.scalar_type();
  orthogonalize_(std::move(matrices), make_iteration(spec.orthogonalize, dtype), eps);
}

} // namespace muon::detail
