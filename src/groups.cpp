#include <algorithm>
#include <sstream>
#include <string_view>
#include <utility>

#include <fnmatch.h>

#include <c10/util/Exception.h>

#include <muon/algorithm.h>
#include <muon/groups.h>

#include "roles.h"

namespace muon {

namespace nn = torch::nn;
using torch::optim::OptimizerParamGroup;

namespace {

// Which kinds of options a rule has given. One that chooses a view replaces all that routing would
// have chosen, one that chooses blocks only the blocks.
struct Given {
  bool algorithm = false;
  bool decay = false;
  bool scale = false;
  bool view = false;
  bool split = false;

  explicit Given(const MuonOptions& options) {
    for (const std::string_view name : options.given()) {
      algorithm |= name == "algorithm";
      decay |= name == "weight_decay";
      scale |= name == "adjust_lr";
      view |= name == "rows" || name == "cols" || name == "flatten" || name == "batch_dims";
      split |= name == "split_sizes" || name == "num_heads" || name == "split_dim";
    }
  }
};

} // namespace

Rule::Rule(const std::string& glob, const MuonOptions& options)
    : Rule(
          [glob](const std::string& name, const at::Tensor&, const nn::Module&) {
            return ::fnmatch(glob.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
          },
          options) {
  label_ = glob;
}

Rule::Rule(const char* glob, const MuonOptions& options) : Rule(std::string(glob), options) {}

Rule::Rule(Match match, const MuonOptions& options)
    : choice_([match = std::move(match), options](
                  const std::string& name, const at::Tensor& parameter, const nn::Module& module) {
        return match(name, parameter, module) ? std::optional(options) : std::nullopt;
      }),
      label_("a predicate") {}

Rule::Rule(Choice choice) : choice_(std::move(choice)), label_("a function"), must_match_(false) {}

/// The rules of one call, with what they have matched so far.
class RuleSet {
 public:
  explicit RuleSet(const std::vector<Rule>& rules) : rules_(rules), matched_(rules.size()) {}

  struct Answer {
    MuonOptions options;
    std::string sources; // the rules that want something; empty: none does
  };

  /// All that the rules want for a parameter.
  Answer ask(const ModelParameter& parameter) {
    Answer answer;
    for (std::size_t i = 0; i < rules_.size(); ++i) {
      bool wants = false;
      for (const Use& use : parameter.uses) {
        auto options = rules_[i].choice_(use.name, parameter.tensor, *use.module);
        if (options) {
          wants = true;
          merge(answer, *std::move(options), use.name, i);
        }
      }
      if (wants) {
        matched_[i] = true;
        answer.sources += (answer.sources.empty() ? "" : ", ") + label(i);
      }
    }
    return answer;
  }

  void check_all_matched(const std::vector<ModelParameter>& parameters) const {
    std::string idle;
    for (std::size_t i = 0; i < rules_.size(); ++i) {
      if (rules_[i].must_match_ && !matched_[i]) {
        idle += (idle.empty() ? "" : ", ") + label(i);
      }
    }
    constexpr std::size_t kShown = 8;
    std::string names;
    for (std::size_t i = 0; i < std::min(kShown, parameters.size()); ++i) {
      names += (i == 0 ? "" : ", ") + parameters[i].uses.front().name;
    }
    names += parameters.size() > kShown ? ", ..." : "";
    TORCH_CHECK_VALUE(
        idle.empty(), idle,
        " matches no parameter; globs must fit the whole name. The names are: ", names);
  }

 private:
  std::string label(std::size_t i) const {
    return "rule " + std::to_string(i) + " (" + rules_[i].label_ + ")";
  }

  void merge(Answer& answer, MuonOptions options, const std::string& name, std::size_t i) const {
    if (Given(options).algorithm) { // names count in any case
      options.algorithm(find_algorithm(std::as_const(options).algorithm()).name);
    }
    const std::string_view option = answer.options.merge(options);
    TORCH_CHECK_VALUE(
        option.empty(), "contradictory rules for \"", name, "\": ", label(i), " gives ", option,
        " another value than ", answer.sources.empty() ? label(i) : answer.sources,
        "; narrow one of them");
  }

  const std::vector<Rule>& rules_;
  std::vector<bool> matched_;
};

namespace {

void take_view(MuonOptions& options, const MatrixLayout& layout) {
  if (layout.flatten) {
    options.flatten(true);
  }
  if (!layout.rows.empty()) {
    options.rows(layout.rows).cols(layout.cols);
  }
}

void take_split(MuonOptions& options, const MatrixLayout& layout) {
  if (layout.num_heads > 0) {
    options.num_heads(layout.num_heads);
  }
  if (layout.split_dim > 0) {
    options.split_dim(layout.split_dim);
  }
}

// The options of a parameter's group; nullopt if it is matrices in a way that nobody has said.
std::optional<MuonOptions> options_of(
    const ModelParameter& parameter, const Role& role, const MuonOptions& wanted) {
  const Given given(wanted);
  const bool on_muon =
      given.view || given.split || role.kind == Kind::Matrix || role.kind == Kind::Unknown;
  const Algorithm& algorithm = find_algorithm(
      given.algorithm ? wanted.algorithm()
          : on_muon   ? "muon"
                      : "adamw");
  MuonOptions options = wanted;
  options.algorithm(algorithm.name);
  if (algorithm.is_elementwise()) {
    if (role.kind == Kind::Gain && !given.decay) {
      options.weight_decay(0.0);
    }
    return options;
  }
  const at::Tensor& tensor = parameter.tensor;
  TORCH_CHECK_VALUE(
      tensor.dim() >= 2, "a rule puts \"", parameter.uses.front().name, "\" of shape ",
      tensor.sizes(), " on \"", algorithm.name,
      "\", which needs matrices: give it the algorithm \"adamw\" or leave it to the default");
  if (!role.layout && tensor.dim() > 2 && !given.view) {
    return std::nullopt;
  }
  if (!given.scale) {
    options.adjust_lr(AdjustLr::MatchRmsAdamw);
  }
  const MatrixLayout layout = role.layout.value_or(MatrixLayout());
  if (!given.view) {
    take_view(options, layout);
  }
  if (!given.view && !given.split) {
    take_split(options, layout);
  }
  return options;
}

std::string reason_of(const Role& role, const RuleSet::Answer& wanted) {
  if (wanted.sources.empty()) {
    return role.reason;
  }
  const Given given(wanted.options);
  const bool decided = given.algorithm || given.view || given.split;
  return decided ? wanted.sources : role.reason + "; options of " + wanted.sources;
}

// The text that lists each parameter with rules to choose from.
std::string ask_for_layouts(const std::vector<const ModelParameter*>& unclear) {
  std::ostringstream text;
  text << "parameters with three or more dimensions need a choice: which dims make the matrices? "
          "Keep one line of each in muon::group_parameters(model, {...}):";
  for (const ModelParameter* parameter : unclear) {
    const at::IntArrayRef sizes = parameter->tensor.sizes();
    const auto batch = sizes.slice(0, sizes.size() - 2);
    const Use& use = parameter->uses.front();
    const auto line = [&](std::string_view options) -> std::ostream& {
      return text << "\n  {\"" << use.name << "\", muon::MuonOptions()." << options << "},";
    };
    text << "\n  // " << use.name << " of " << class_name(*use.module) << ", shape " << sizes;
    line(c10::str("batch_dims(", batch.size(), ")"))
        << " // " << c10::multiply_integers(batch) << " matrices of " << sizes[sizes.size() - 2]
        << " x " << sizes.back();
    line("flatten(true)") << " // one matrix of " << sizes[0] << " x "
                          << c10::multiply_integers(sizes.slice(1));
    line("algorithm(\"adamw\")") << " // none";
  }
  return text.str();
}

void warn_if_nothing_on_muon(const std::vector<Decision>& decisions) {
  std::size_t trained = 0;
  for (const Decision& decision : decisions) {
    if (decision.frozen) {
      continue;
    }
    if (!find_algorithm(decision.options.algorithm()).is_elementwise()) {
      return;
    }
    ++trained;
  }
  if (trained > 0) {
    TORCH_WARN("no parameter is on Muon: all ", trained, " go to other algorithms.");
  }
}

bool same_group(const MuonOptions& a, const MuonOptions& b) {
  return a == b && a.given() == b.given();
}

} // namespace

std::vector<Decision> route_parameters(const nn::Module& model, const std::vector<Rule>& rules) {
  const std::vector<ModelParameter> parameters = collect_parameters(model);
  RuleSet rule_set(rules);
  std::vector<Decision> decisions;
  std::vector<const ModelParameter*> unclear;
  for (const ModelParameter& parameter : parameters) {
    const RuleSet::Answer wanted = rule_set.ask(parameter);
    const std::string& name = parameter.uses.front().name;
    if (!parameter.tensor.requires_grad()) {
      decisions.push_back({name, parameter.tensor, {}, "frozen: requires_grad is false", true});
      continue;
    }
    const Role role = role_of(parameter);
    if (auto options = options_of(parameter, role, wanted.options)) {
      decisions.push_back(
          {name, parameter.tensor, *std::move(options), reason_of(role, wanted), false});
    } else {
      unclear.push_back(&parameter);
    }
  }
  rule_set.check_all_matched(parameters);
  TORCH_CHECK_VALUE(unclear.empty(), ask_for_layouts(unclear));
  warn_if_nothing_on_muon(decisions);
  return decisions;
}

std::vector<OptimizerParamGroup> group_parameters(
    const nn::Module& model, const std::vector<Rule>& rules) {
  struct Group {
    MuonOptions options;
    std::vector<at::Tensor> parameters;
    std::vector<std::string> names;
    std::vector<std::string> reasons;
  };
  std::vector<Group> groups;
  for (Decision& decision : route_parameters(model, rules)) {
    if (decision.frozen) {
      continue;
    }
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& other) {
      return same_group(other.options, decision.options);
    });
    if (group == groups.end()) {
      group = groups.insert(group, Group{std::move(decision.options), {}, {}, {}});
    }
    group->parameters.push_back(std::move(decision.parameter));
    group->names.push_back(std::move(decision.name));
    group->reasons.push_back(std::move(decision.reason));
  }
  TORCH_CHECK_VALUE(
      !groups.empty(), "no parameter requires a gradient: there is nothing to optimize");
  std::vector<OptimizerParamGroup> result;
  for (Group& group : groups) {
    group.options.param_names(std::move(group.names)).reasons(std::move(group.reasons));
    result.emplace_back(
        std::move(group.parameters), std::make_unique<MuonOptions>(std::move(group.options)));
  }
  return result;
}

} // namespace muon
