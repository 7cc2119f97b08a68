// The state file of <muon/state_file.h>: an optimizer's groups as JSON, its state as tensors.
#include <muon/state_file.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "group_checks.h"
#include "option_json.h"
#include "param_state.h"
#include "state/file.h"
#include "state/json.h"

namespace muon {
namespace {

using detail::Json;
using Tensors = std::map<std::string, at::Tensor>;

constexpr const char* kFormat = "libmuon state";
constexpr const char* kVersion = "1";
constexpr std::size_t kShown = 8; // names in an error

struct SavedParam {
  std::optional<std::string> name;
  std::vector<std::int64_t> sizes;
  std::size_t group = 0;
  Tensors state;
};

struct SavedGroup {
  MuonOptions options;
  std::vector<SavedParam> params;
};

std::string place(std::size_t group, std::size_t index) {
  return c10::str(group, '.', index);
}

std::optional<std::string> name_of(const MuonOptions& options, std::size_t index) {
  const std::vector<std::string>& names = options.param_names();
  return index < names.size() ? std::optional(names[index]) : std::nullopt;
}

const MuonOptions& options_of(const Muon& optimizer, std::size_t group) {
  return optimizer.options(group);
}

// --- Saving ---

// A parameter's state; what no step has created yet is created.
Tensors state_to_save(
    const Muon& optimizer, const at::Tensor& param, const MuonOptions& options,
    const std::string& label) {
  Tensors state;
  const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
  if (found != optimizer.state().end()) {
    state = static_cast<const MuonParamState&>(*found->second).tensors();
  }
  if (detail::takes_part(param)) {
    for (const StateTensor& slot : detail::state_slots(options, param, label)) {
      at::Tensor& tensor = state[slot.name];
      tensor = tensor.defined() ? tensor : detail::create_state(slot, param, options);
    }
  }
  return state;
}

Json param_to_json(const std::optional<std::string>& name, const at::Tensor& param) {
  const std::string dtype(c10::getDtypeNames(param.scalar_type()).first);
  return Json::Object{
      {"name", name ? Json(*name) : Json()},
      {"shape", Json::Array(param.sizes().begin(), param.sizes().end())},
      {"dtype", dtype}};
}

Json group_to_json(const MuonOptions& options, Json::Array params) {
  Json::Object own;
  for (const auto& [name, value] : options.algorithm_options()) {
    own.emplace_back(name, value);
  }
  return Json::Object{
      {"algorithm", options.spec().algorithm},
      {"options", detail::options_to_json(options)},
      {"algorithm_options", std::move(own)},
      {"params", std::move(params)},
      {"extra", Json::Object{}}};
}

// --- Loading ---

template <typename T>
const T& member(const Json& object, const char* key, const std::string& context) {
  const Json* value = object.find(key);
  const T* found = value == nullptr ? nullptr : value->get_if<T>();
  TORCH_CHECK_VALUE(
      found != nullptr, context, "its groups are damaged: ", key, " is ",
      value == nullptr ? "missing" : value->kind());
  return *found;
}

SavedParam read_param(const Json& json, const std::string& context) {
  SavedParam param;
  const Json* name = json.find("name");
  if (name != nullptr && !name->is_null()) {
    param.name = member<std::string>(json, "name", context);
  }
  for (const Json& size : member<Json::Array>(json, "shape", context)) {
    const auto* value = size.get_if<std::int64_t>();
    TORCH_CHECK_VALUE(
        value != nullptr && *value >= 0, context, "its groups are damaged: a shape holds ",
        size.dump().substr(0, 80));
    param.sizes.push_back(*value);
  }
  return param;
}

std::vector<SavedGroup> read_groups(const std::string& text, const std::string& context) {
  const detail::JsonContext json_context{context + "its groups", "; it is damaged"};
  const Json json = Json::parse(text, json_context);
  const auto* groups = json.get_if<Json::Array>();
  TORCH_CHECK_VALUE(
      groups != nullptr, context, "its groups are damaged: expected a list, got ", json.kind());
  std::vector<SavedGroup> result;
  for (const Json& group : *groups) {
    SavedGroup saved;
    const Json* options = group.find("options");
    TORCH_CHECK_VALUE(options != nullptr, context, "its groups are damaged: options is missing");
    saved.options = detail::options_from_json(
        *options, member<std::string>(group, "algorithm", context), group.find("algorithm_options"),
        context);
    for (const Json& param : member<Json::Array>(group, "params", context)) {
      saved.params.push_back(read_param(param, context));
      saved.params.back().group = result.size();
    }
    result.push_back(std::move(saved));
  }
  return result;
}

// Gives every tensor of the file to its parameter.
void sort_tensors(
    std::vector<SavedGroup>& groups, detail::StateFile& file, const std::string& context) {
  std::map<std::string, SavedParam*> by_name;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].params.size(); ++i) {
      SavedParam& param = groups[g].params[i];
      const std::string name = param.name.value_or(place(g, i));
      TORCH_CHECK_VALUE(
          by_name.emplace(name, &param).second, context, "two parameters are called ",
          detail::quoted(name));
    }
  }
  for (auto& [name, tensor] : file.tensors) {
    const std::size_t slash = name.rfind('/');
    const auto found = by_name.find(name.substr(0, slash));
    TORCH_CHECK_VALUE(
        slash != std::string::npos && found != by_name.end(), context, "tensor ",
        detail::quoted(name), " belongs to none of its parameters");
    found->second->state[name.substr(slash + 1)] = std::move(tensor);
  }
}

std::string listed(const std::vector<std::string>& names) {
  std::vector<std::string> shown(
      names.begin(), names.begin() + static_cast<std::ptrdiff_t>(std::min(kShown, names.size())));
  return c10::Join(", ", shown) +
      (names.size() > kShown ? c10::str(" and ", names.size() - kShown, " more") : "");
}

bool all_named(const Muon& optimizer) {
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const std::size_t params = optimizer.param_groups()[g].params().size();
    if (params > 0 && options_of(optimizer, g).param_names().empty()) {
      return false;
    }
  }
  return true;
}

bool all_named(const std::vector<SavedGroup>& groups) {
  for (const SavedGroup& group : groups) {
    for (const SavedParam& param : group.params) {
      if (!param.name) {
        return false;
      }
    }
  }
  return true;
}

// The saved parameter of every live one, by name, else by place.
class Matches {
 public:
  Matches(const Muon& optimizer, std::vector<SavedGroup>& groups, const std::string& context)
      : context_(context), by_name_(all_named(optimizer) && all_named(groups)) {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (std::size_t i = 0; i < groups[g].params.size(); ++i) {
        SavedParam& param = groups[g].params[i];
        saved_.emplace(by_name_ ? *param.name : place(g, i), &param);
      }
    }
    check_sets(optimizer);
  }

  const SavedParam& find(const MuonOptions& options, std::size_t group, std::size_t index) const {
    return *saved_.at(key(options, group, index));
  }

 private:
  std::string key(const MuonOptions& options, std::size_t group, std::size_t index) const {
    return by_name_ ? options.param_names()[index] : place(group, index);
  }

  void check_sets(const Muon& optimizer) const {
    std::vector<std::string> missing;
    std::set<std::string> unused;
    for (const auto& [name, param] : saved_) {
      unused.insert(name);
    }
    for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
      for (std::size_t i = 0; i < optimizer.param_groups()[g].params().size(); ++i) {
        const std::string name = key(options_of(optimizer, g), g, i);
        if (unused.erase(name) == 0) {
          missing.push_back(name);
        }
      }
    }
    const std::vector<std::string> extra(unused.begin(), unused.end());
    TORCH_CHECK_VALUE(
        missing.empty() && extra.empty(), context_,
        missing.empty() ? "" : "it has no state for " + listed(missing),
        !missing.empty() && !extra.empty() ? ", but " : "",
        extra.empty() ? "" : "it has state for " + listed(extra) + ", which this optimizer has not",
        by_name_ ? "" : " (by place, GROUP.INDEX: give all parameters names to match by name)",
        "; build the optimizer with the parameters of the run that was saved");
  }

  const std::string& context_;
  bool by_name_;
  std::map<std::string, SavedParam*> saved_;
};

// The options that the file has for a group's parameters, and this run's own.
MuonOptions options_for(
    const Muon& optimizer, std::size_t g, const std::vector<SavedGroup>& groups,
    const Matches& matches, const std::string& context) {
  const MuonOptions& live = options_of(optimizer, g);
  const std::vector<at::Tensor>& params = optimizer.param_groups()[g].params();
  if (params.empty()) {
    return live;
  }
  MuonOptions options = groups[matches.find(live, g, 0).group].options;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const SavedParam& saved = matches.find(live, g, i);
    const MuonOptions& other = groups[saved.group].options;
    const std::string label = detail::param_label(live, g, i);
    TORCH_CHECK_VALUE(
        other == options, context, "it has different options for ", detail::param_label(live, g, 0),
        " and ", label, ", which are both in group ", g,
        " here; divide the groups as in the run that was saved");
    TORCH_CHECK_VALUE(
        other.algorithm() == live.algorithm(), context, "it has algorithm \"", other.algorithm(),
        "\" for ", label, ", which this optimizer trains with \"", live.algorithm(),
        "\"; build it with the groups of the run that was saved");
    TORCH_CHECK_VALUE(
        params[i].sizes() == at::IntArrayRef(saved.sizes), context, "it has ", label, " of shape ",
        at::IntArrayRef(saved.sizes), ", expected ", params[i].sizes());
  }
  options.keep_from(live);
  options.check(detail::group_label(options, g));
  detail::MatrixCheck shapes;
  shapes.add(params, options, g);
  shapes.finish();
  return options;
}

} // namespace

void save_state(const Muon& optimizer, const std::string& path) {
  const at::NoGradGuard no_grad;
  detail::StateFile file;
  Json::Array groups;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const MuonOptions& options = options_of(optimizer, g);
    const std::vector<at::Tensor>& params = optimizer.param_groups()[g].params();
    Json::Array json;
    for (std::size_t i = 0; i < params.size(); ++i) {
      const std::optional<std::string> name = name_of(options, i);
      json.push_back(param_to_json(name, params[i]));
      const std::string label = detail::param_label(options, g, i);
      for (const auto& [key, tensor] : state_to_save(optimizer, params[i], options, label)) {
        file.tensors.emplace_back(name.value_or(place(g, i)) + '/' + key, tensor);
      }
    }
    groups.push_back(group_to_json(options, std::move(json)));
  }
  file.metadata = {
      {"format", kFormat}, {"version", kVersion}, {"groups", Json(std::move(groups)).dump()}};
  detail::write_state_file(path, file);
}

void load_state(Muon& optimizer, const std::string& path) {
  const at::NoGradGuard no_grad;
  const std::string context = c10::str("muon: cannot load state file ", detail::quoted(path), ": ");
  detail::StateFile file = detail::read_state_file(path);
  TORCH_CHECK_VALUE(
      file.metadata["format"] == kFormat, context,
      "it is no state of libmuon's; see python -m libmuon convert");
  TORCH_CHECK_VALUE(
      file.metadata["version"] == kVersion, context, "its version is ",
      detail::quoted(file.metadata["version"]), ", and this libmuon reads version ", kVersion);
  std::vector<SavedGroup> groups = read_groups(file.metadata["groups"], context);
  sort_tensors(groups, file, context);
  const Matches matches(optimizer, groups, context);

  std::vector<MuonOptions> loaded;
  std::remove_reference_t<decltype(optimizer.state())> state;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    loaded.push_back(options_for(optimizer, g, groups, matches, context));
    const std::vector<at::Tensor>& params = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      const SavedParam& saved = matches.find(options_of(optimizer, g), g, i);
      if (saved.state.empty()) {
        continue;
      }
      auto entry = std::make_unique<MuonParamState>(params[i]);
      entry->tensors() = detail::adapt_state(
          saved.state, params[i], loaded.back(), detail::param_label(loaded.back(), g, i));
      state[params[i].unsafeGetTensorImpl()] = std::move(entry);
    }
  }

  for (std::size_t g = 0; g < loaded.size(); ++g) {
    optimizer.options(g) = std::move(loaded[g]);
  }
  optimizer.state() = std::move(state);
}

} // namespace muon
