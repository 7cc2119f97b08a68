// torch::save and torch::load: the format of LibTorch's own optimizers.

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <muon/optimizer.h>

#include "group_checks.h"
#include "param_state.h"

namespace muon {
namespace {

using StateMap = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;
// Per group: the addresses that its parameters had, and its options.
using SavedGroup =
    std::pair<std::vector<std::string>, std::unique_ptr<torch::optim::OptimizerOptions>>;

// torch writes this version into every optimizer's archive since 1.5.
constexpr const char* kFormat = "1.5.0";

struct Saved {
  StateMap state;
  std::vector<SavedGroup> groups;
};

Saved read(torch::serialize::InputArchive& archive) {
  c10::IValue format;
  TORCH_CHECK_VALUE(
      archive.try_read("pytorch_version", format) && format.isString() &&
          format.toStringRef() == kFormat,
      "muon: expected an archive that torch::save wrote for an optimizer");
  Saved saved;
  torch::serialize::InputArchive part;
  archive.read("state", part);
  torch::optim::detail::serialize<MuonParamState>(part, saved.state);
  archive.read("param_groups", part);
  torch::optim::detail::serialize<MuonOptions>(part, saved.groups);
  return saved;
}

// State means the same parameter and the same algorithm, or nothing.
void check_same_group(const MuonOptions& saved, const MuonOptions& current, std::size_t group) {
  TORCH_CHECK_VALUE(
      saved.algorithm() == current.algorithm(), "loaded state dict has algorithm \"",
      saved.algorithm(), "\" for a group that this optimizer trains with \"", current.algorithm(),
      "\" (", detail::group_label(current, group),
      "); build it with the groups of the run that was saved");
  if (saved.param_names().empty() || current.param_names().empty()) {
    return;
  }
  for (std::size_t i = 0; i < current.param_names().size(); ++i) {
    const std::string& expected = current.param_names()[i];
    const std::string found = i < saved.param_names().size() ? saved.param_names()[i] : "nothing";
    TORCH_CHECK_VALUE(
        found == expected, "loaded state dict has ", found, " where this optimizer has ", expected,
        " (group ", group,
        "); build it with the groups of the run that was saved, or clear param_names");
  }
}

// The saved tensors, as this optimizer would have created them.
std::unique_ptr<MuonParamState> convert(
    const MuonParamState& saved, const at::Tensor& param, const MuonOptions& options,
    const std::string& name) {
  auto state = std::make_unique<MuonParamState>(param);
  state->tensors() = detail::adapt_state(saved.tensors(), param, options, name);
  return state;
}

} // namespace

void Muon::save(torch::serialize::OutputArchive& archive) const {
  const at::NoGradGuard no_grad;
  StateMap state;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    const std::vector<at::Tensor>& params = param_groups_[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      void* const key = params[i].unsafeGetTensorImpl();
      const auto found = state_.find(key);
      auto copy = found == state_.end() ? MuonParamState()
                                        : static_cast<const MuonParamState&>(*found->second);
      if (detail::takes_part(params[i])) {
        for (const StateTensor& slot :
             detail::state_slots(options(g), params[i], detail::param_label(options(g), g, i))) {
          at::Tensor& tensor = copy.tensors()[slot.name];
          tensor = tensor.defined() ? tensor : detail::create_state(slot, params[i], options(g));
        }
      }
      if (!copy.tensors().empty()) {
        state[key] = std::make_unique<MuonParamState>(std::move(copy));
      }
    }
  }

  archive.write("pytorch_version", c10::IValue(kFormat));
  torch::serialize::OutputArchive state_archive(archive.compilation_unit());
  torch::optim::detail::serialize<MuonParamState>(state_archive, state);
  archive.write("state", state_archive);
  torch::serialize::OutputArchive groups_archive(archive.compilation_unit());
  torch::optim::detail::serialize<MuonOptions>(groups_archive, param_groups_);
  archive.write("param_groups", groups_archive);
}

void Muon::load(torch::serialize::InputArchive& archive) {
  const at::NoGradGuard no_grad;
  Saved saved = read(archive);
  TORCH_CHECK_VALUE(
      saved.groups.size() == param_groups_.size(),
      "loaded state dict has a different number of parameter groups: ", saved.groups.size(),
      ", expected ", param_groups_.size());

  // Everything is read and checked before the first change.
  StateMap state;
  std::vector<MuonOptions> loaded;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    const std::vector<at::Tensor>& params = param_groups_[g].params();
    const std::vector<std::string>& addresses = saved.groups[g].first;
    TORCH_CHECK_VALUE(
        addresses.size() == params.size(),
        "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: group ",
        g, " has ", addresses.size(), " parameters in the archive, expected ", params.size());
    loaded.push_back(static_cast<const MuonOptions&>(*saved.groups[g].second));
    MuonOptions& group_options = loaded.back();
    check_same_group(group_options, options(g), g);
    group_options.keep_from(options(g));
    group_options.check(detail::group_label(group_options, g));
    detail::MatrixCheck matrices;
    matrices.add(params, group_options, g);
    matrices.finish();
    for (std::size_t i = 0; i < params.size(); ++i) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr): a key, never followed
      const auto found = saved.state.find(reinterpret_cast<void*>(std::stoull(addresses[i])));
      if (found != saved.state.end()) {
        state[params[i].unsafeGetTensorImpl()] = convert(
            static_cast<const MuonParamState&>(*found->second), params[i], group_options,
            detail::param_label(group_options, g, i));
      }
    }
  }

  for (std::size_t g = 0; g < loaded.size(); ++g) {
    options(g) = std::move(loaded[g]);
  }
  state_ = std::move(state);
}

} // namespace muon
