#include <algorithm>
#include <cctype>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <muon/algorithm.h>

namespace muon {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(), [](unsigned char c) {
    return std::tolower(c);
  });
  return result;
}

Algorithm make_muon() {
  Algorithm algorithm;
  algorithm.name = "muon";
  algorithm.state = {{"momentum_buffer", StateSlot::Kind::LikeParam}};
  return algorithm;
}

Algorithm make_normuon() {
  Algorithm algorithm = make_muon();
  algorithm.name = "normuon";
  algorithm.state.push_back({"variance_neuron", StateSlot::Kind::PerRow});
  algorithm.refine = "muon::normuon_";
  return algorithm;
}

Algorithm make_adam(const std::string& name) {
  Algorithm algorithm;
  algorithm.name = name;
  algorithm.state = {
      {"exp_avg", StateSlot::Kind::LikeParam},
      {"exp_avg_sq", StateSlot::Kind::LikeParam},
      {"step", StateSlot::Kind::Step}};
  algorithm.update = "muon::adam_";
  return algorithm;
}

class Registry {
 public:
  static Registry& instance() {
    static Registry registry;
    return registry;
  }

  void add(Algorithm algorithm, bool replace) {
    const std::lock_guard lock(mutex_);
    const Algorithm*& entry = algorithms_[algorithm.name];
    if (entry != nullptr && *entry == algorithm) {
      return;
    }
    const bool may_replace = replace && !own_names_.contains(algorithm.name);
    TORCH_CHECK_VALUE(
        entry == nullptr || may_replace, "muon: expected a new algorithm name, got \"",
        algorithm.name, "\", which is registered already");
    entry = &all_.emplace_back(std::move(algorithm));
  }

  const Algorithm* find(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto found = algorithms_.find(name);
    return found == algorithms_.end() ? nullptr : found->second;
  }

  std::vector<std::string> names() {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> result;
    for (const auto& [name, algorithm] : algorithms_) {
      result.push_back(name);
    }
    return result;
  }

 private:
  Registry() {
    for (Algorithm algorithm :
         {make_muon(), make_normuon(), make_adam("adam"), make_adam("adamw")}) {
      own_names_.insert(algorithm.name);
      const std::string name = algorithm.name;
      algorithms_[name] = &all_.emplace_back(std::move(algorithm));
    }
  }

  std::mutex mutex_;
  std::list<Algorithm> all_; // replaced ones too: plans point to them
  std::map<std::string, const Algorithm*> algorithms_;
  std::set<std::string> own_names_;
};

void check_op_exists(const std::string& name) {
  TORCH_CHECK_VALUE(
      name.empty() || c10::Dispatcher::singleton().findSchema({name, ""}),
      "muon: expected the name of a registered op, got \"", name,
      "\"; define it before the algorithm");
}

template <typename Named>
void check_names(const std::vector<Named>& items, const char* what, const std::string& algorithm) {
  std::set<std::string> seen;
  for (const Named& item : items) {
    TORCH_CHECK_VALUE(
        !item.name.empty() && seen.insert(item.name).second, "muon: expected ", what,
        "s of different names, got \"", item.name, "\" (", algorithm, ")");
  }
}

} // namespace

void register_algorithm(Algorithm algorithm, bool replace) {
  algorithm.name = lower(algorithm.name);
  TORCH_CHECK_VALUE(!algorithm.name.empty(), "muon: expected an algorithm with a name, got \"\"");
  check_names(algorithm.state, "state slot", algorithm.name);
  check_names(algorithm.options, "option", algorithm.name);
  if (algorithm.is_elementwise()) {
    check_op_exists(algorithm.update);
  } else if (!algorithm.matrix_update.empty()) {
    check_op_exists(algorithm.matrix_update);
  } else {
    TORCH_CHECK_VALUE(
        !algorithm.state.empty() && algorithm.state.front().kind == StateSlot::Kind::LikeParam,
        "muon: expected a matrix algorithm whose first state slot is the momentum, like its parameter (",
        algorithm.name, ")");
    for (const std::string& op :
         {algorithm.accumulate, algorithm.orthogonalize, algorithm.refine, algorithm.apply}) {
      check_op_exists(op);
    }
  }
  Registry::instance().add(std::move(algorithm), replace);
}

const Algorithm& find_algorithm(std::string_view name) {
  const Algorithm* algorithm = Registry::instance().find(lower(name));
  TORCH_CHECK_VALUE(
      algorithm != nullptr, "Unknown algorithm \"", name, "\": muon knows ",
      c10::Join(", ", registered_algorithms()),
      "; one of your own must be registered first (register_algorithm)");
  return *algorithm;
}

std::vector<std::string> registered_algorithms() {
  return Registry::instance().names();
}

} // namespace muon
