#include "support/optimizers.h"

#include <sstream>

#include <ATen/ATen.h>
#include <torch/serialize.h>

#include "support/reference.h"

namespace muon::testing {

at::Tensor parameter(c10::IntArrayRef sizes, std::uint64_t salt, c10::ScalarType dtype) {
  return random_tensor(sizes, c10::isComplexType(dtype), salt).to(dtype).requires_grad_();
}

std::vector<at::Tensor> clone_parameters(const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> clones;
  for (const at::Tensor& param : params) {
    clones.push_back(param.detach().clone().requires_grad_(param.requires_grad()));
  }
  return clones;
}

void set_gradients(const std::vector<at::Tensor>& params, std::uint64_t salt) {
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    param.mutable_grad() =
        random_tensor(param.sizes(), param.is_complex(), 1000 * salt + i).to(param.scalar_type());
  }
}

std::vector<at::Tensor> snapshot(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) {
    copies.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
  }
  return copies;
}

torch::optim::OptimizerParamGroup group(
    std::vector<at::Tensor> params, const MuonOptions& options) {
  return {std::move(params), std::make_unique<MuonOptions>(options)};
}

std::vector<at::Tensor> parameters_of(const Muon& optimizer) {
  std::vector<at::Tensor> params;
  for (const auto& group : optimizer.param_groups()) {
    params.insert(params.end(), group.params().begin(), group.params().end());
  }
  return params;
}

at::Tensor state_of(const Muon& optimizer, const at::Tensor& param, const std::string& key) {
  const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
  return found == optimizer.state().end()
      ? at::Tensor()
      : static_cast<const MuonParamState&>(*found->second).get(key);
}

std::string save(const Muon& optimizer) {
  std::ostringstream out;
  torch::save(optimizer, out);
  return out.str();
}

void load(Muon& optimizer, const std::string& bytes) {
  std::istringstream in(bytes);
  torch::load(optimizer, in);
}

::testing::AssertionResult bit_equal(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) {
    return ::testing::AssertionFailure() << "one of them is undefined";
  }
  if (!a.defined()) {
    return ::testing::AssertionSuccess();
  }
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
    return ::testing::AssertionFailure() << a.scalar_type() << " " << a.sizes() << " against "
                                         << b.scalar_type() << " " << b.sizes();
  }
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.detach().contiguous().reshape({-1}).view(at::kByte);
  };
  if (!a.numel() || at::equal(bytes(a), bytes(b))) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure()
      << "largest difference " << (a.detach() - b.detach()).abs().max().item<double>();
}

::testing::AssertionResult bit_equal(
    const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) {
    return ::testing::AssertionFailure() << a.size() << " tensors against " << b.size();
  }
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (auto result = bit_equal(a[i], b[i]); !result) {
      return result << " in tensor " << i;
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult same_bits(const Muon& a, const Muon& b) {
  const std::vector<at::Tensor> params_a = parameters_of(a);
  const std::vector<at::Tensor> params_b = parameters_of(b);
  if (auto result = bit_equal(params_a, params_b); !result) {
    return result << " (parameters)";
  }
  for (std::size_t i = 0; i < params_a.size(); ++i) {
    const auto found = a.state().find(params_a[i].unsafeGetTensorImpl());
    const auto other = b.state().find(params_b[i].unsafeGetTensorImpl());
    if ((found == a.state().end()) != (other == b.state().end())) {
      return ::testing::AssertionFailure() << "only one has state of parameter " << i;
    }
    if (found == a.state().end()) {
      continue;
    }
    const auto& tensors_a = static_cast<const MuonParamState&>(*found->second).tensors();
    const auto& tensors_b = static_cast<const MuonParamState&>(*other->second).tensors();
    if (tensors_a.size() != tensors_b.size()) {
      return ::testing::AssertionFailure() << "different state keys of parameter " << i;
    }
    for (const auto& [key, tensor] : tensors_a) {
      const auto twin = tensors_b.find(key);
      if (twin == tensors_b.end()) {
        return ::testing::AssertionFailure() << "no " << key << " of parameter " << i;
      }
      if (auto result = bit_equal(tensor, twin->second); !result) {
        return result << " in " << key << " of parameter " << i;
      }
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult mentions(
    const std::string& text, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << "\"" << part << "\" is not in: " << text;
    }
  }
  return ::testing::AssertionSuccess();
}

} // namespace muon::testing
