#include "group_checks.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <muon/algorithm.h>

#include "param_state.h"

namespace muon::detail {

const MuonOptions& own_options(const torch::optim::OptimizerParamGroup& group, std::size_t index) {
  static const MuonOptions none;
  if (!group.has_options()) {
    return none;
  }
  const auto* options = dynamic_cast<const MuonOptions*>(&group.options());
  TORCH_CHECK_TYPE(
      options != nullptr, "muon: expected MuonOptions for group ", index,
      ", got the options of another optimizer");
  return *options;
}

void check_params(
    const std::vector<at::Tensor>& params, const MuonOptions& options, std::size_t group,
    std::unordered_set<const at::TensorImpl*>& seen) {
  for (const auto* notes : {&options.param_names(), &options.reasons()}) {
    TORCH_CHECK_VALUE(
        notes->empty() || notes->size() == params.size(),
        "muon: expected one of param_names, and of reasons, for each of ", params.size(),
        " parameters, got ", notes->size(), " (group ", group, ")");
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    const std::string name = param_label(options, group, i);
    TORCH_CHECK_VALUE(
        param.defined(), "muon: expected a tensor, got an undefined one (", name, ")");
    TORCH_CHECK_VALUE(param.is_leaf(), "can't optimize a non-leaf Tensor (", name, ")");
    TORCH_CHECK_TYPE(
        param.is_floating_point() || param.is_complex(),
        "muon: expected floating point or complex parameters, got ", param.scalar_type(), " (",
        name, ")");
    TORCH_CHECK_NOT_IMPLEMENTED(
        param.layout() == at::kStrided, "muon: expected a dense parameter, got layout ",
        param.layout(), " (", name, ")");
    TORCH_CHECK_VALUE(
        seen.insert(param.unsafeGetTensorImpl()).second,
        "some parameters appear in more than one parameter group, or twice in one (", name, ")");
    const bool is_widened = options.stochastic_rounding() || options.split_master();
    TORCH_CHECK_NOT_IMPLEMENTED(
        param.scalar_type() != at::kHalf || !is_widened,
        "stochastic_rounding and split_master are for bfloat16 parameters, got ",
        param.scalar_type(), " (", name, "); keep float32 parameters and train under autocast");
    if (param.scalar_type() == at::kBFloat16 && !is_widened) {
      TORCH_WARN_ONCE(
          "bfloat16 parameters are rounded to 8 significant bits after every step: updates below "
          "1/256 of a weight do not move it. Where that matters, split_master keeps 16 more bits, "
          "stochastic_rounding rounds without a bias, or keep float32 parameters and train under "
          "autocast.");
    }
  }
}

void MatrixCheck::add(
    const std::vector<at::Tensor>& params, const MuonOptions& options, std::size_t group) {
  if (is_elementwise(options)) {
    return;
  }
  const bool chosen = !options.rows().empty() || !options.cols().empty() || options.flatten() ||
      options.batch_dims() >= 0;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    const std::string name = param_label(options, group, i);
    const std::int64_t dims = param.dim() - (options.complex_dim() ? 1 : 0);
    if (dims < 2 || (dims > 2 && !chosen)) {
      first_size_ = first_size_.empty() ? c10::str(param.sizes()) : first_size_;
      offenders_ += c10::str("\n  ", name, ": ", param.sizes());
      (dims < 2 ? too_few_dims_ : too_many_dims_) = true;
      continue;
    }
    TORCH_CHECK_VALUE(
        !param.is_complex() || !options.complex_dim(),
        "muon: expected complex_dim on a real tensor, got ", param.scalar_type(), " (", name, ")");
    matrix_shapes(param.sizes(), options.layout(), name);
  }
}

void MatrixCheck::finish() const {
  TORCH_CHECK_VALUE(
      offenders_.empty(),
      "Muon only supports 2D parameters whereas we found a parameter with size: ", first_size_,
      ". Of these parameters it cannot tell how they are matrices:", offenders_,
      too_many_dims_
          ? "\nThree or more dims: say in the group what a matrix is, with .rows({...}).cols({...}), "
            ".flatten(true) (rows = dim 0, columns = the rest: convolutions) or .batch_dims(k) (the "
            "first k dims are a batch: experts, stacked layers)."
          : "",
      too_few_dims_
          ? "\nBiases, norms and scalars: put them into a group with .algorithm(\"adamw\") and an lr "
            "of its own."
          : "");
}

bool is_elementwise(const MuonOptions& options) {
  return find_algorithm(options.algorithm()).is_elementwise();
}

} // namespace muon::detail
