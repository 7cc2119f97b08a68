#include "functional.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <muon/step.h>

namespace muon {
namespace {

// Plans of recent calls, by what determines them. Forgetting one costs time only.
class PlanCache {
 public:
  static PlanCache& instance() {
    static PlanCache cache;
    return cache;
  }

  PlanHandle get(at::TensorList params, std::string_view spec) {
    std::string key(spec);
    for (const at::Tensor& param : params) {
      key += c10::str(';', param.device(), ' ', param.scalar_type(), ' ', param.sizes());
    }
    const std::lock_guard lock(mutex_);
    if (const auto found = plans_.find(key); found != plans_.end()) {
      return found->second;
    }
    if (plans_.size() >= kCapacity) {
      for (const auto& [_, plan] : plans_) {
        free_plan(plan);
      }
      plans_.clear();
    }
    return plans_.emplace(std::move(key), create(params, spec)).first->second;
  }

 private:
  static constexpr std::size_t kCapacity = 64;

  static PlanHandle create(at::TensorList params, std::string_view spec) {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < params.size(); ++i) {
      names.push_back(c10::str("params[", i, "]"));
    }
    const std::vector<std::int64_t> groups(params.size(), 0);
    return create_plan(params, groups, {parse_group_spec(spec)}, names);
  }

  std::mutex mutex_;
  std::map<std::string, PlanHandle> plans_;
};

} // namespace

void muon_(
    at::TensorList params, const std::vector<at::Tensor>& grads, at::TensorList momentum_buffers,
    const at::Tensor& hyper, std::string_view spec) {
  if (params.empty()) {
    return;
  }
  step_(PlanCache::instance().get(params, spec), params, grads, momentum_buffers, hyper);
}

} // namespace muon
