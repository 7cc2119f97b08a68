// Trains a small convolutional net on digits: each kernel is one matrix of its output channels.
//   digits out/examples/digits.bin out/examples/digits_cpp.json 0.01
// examples/python/clients/train_digits.py writes the data and trains the same net; the losses are equal up to rounding.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <muon/muon.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <nlohmann/json.hpp>

namespace {

constexpr std::int64_t kTrain = 1400;
constexpr std::int64_t kSteps = 300;
constexpr std::int64_t kBatch = 64;
constexpr std::uint64_t kSeed = 0;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    using Options = torch::nn::Conv2dOptions;
    conv1 = register_module("conv1", torch::nn::Conv2d(Options(1, 16, 3).padding(1)));
    conv2 = register_module("conv2", torch::nn::Conv2d(Options(16, 32, 3).padding(1).stride(2)));
    head = register_module("head", torch::nn::Linear(32 * 4 * 4, 10));
  }

  /// Draws every weight in parameter order; biases are zero.
  void initialize(std::uint64_t seed) {
    const at::NoGradGuard no_grad;
    auto generator = at::detail::createCPUGenerator(seed);
    for (auto& parameter : parameters()) {
      if (parameter.dim() < 2) {
        parameter.zero_();
      } else {
        const auto fan_in = static_cast<double>(parameter[0].numel());
        parameter.normal_(0.0, 1.0 / std::sqrt(fan_in), generator);
      }
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    return head(at::relu(conv2(at::relu(conv1(x)))).flatten(1));
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

struct Digits {
  at::Tensor pictures; ///< [n, 1, 8, 8] in [-1, 1]
  at::Tensor labels; ///< [n]

  /// A picture is 64 bytes, 0 to 16, and its label.
  explicit Digits(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string bytes(std::istreambuf_iterator<char>(file), {});
    TORCH_CHECK(!bytes.empty(), "cannot read ", path, "; train_digits.py writes it");
    const auto rows =
        at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size()) / 65, 65}, at::kByte);
    pictures = rows.narrow(1, 0, 64).to(at::kFloat).div(8).sub(1).view({-1, 1, 8, 8});
    labels = rows.select(1, 64).to(at::kLong);
  }
};

void run(const std::string& data, const std::string& out, double lr) {
  at::set_num_threads(1);
  const Digits digits(data);
  Net net;
  net->initialize(kSeed);
  muon::Muon optimizer(muon::group_parameters(*net), muon::MuonOptions(lr));
  auto generator = at::detail::createCPUGenerator(kSeed);

  std::vector<double> losses;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const auto left = 1.0 - static_cast<double>(step) / static_cast<double>(kSteps);
    for (auto& group : optimizer.param_groups()) {
      group.options().set_lr(lr * left);
    }
    const auto index = at::randint(0, kTrain, {kBatch}, generator, at::kLong);
    const auto loss = at::cross_entropy_loss(
        net->forward(digits.pictures.index_select(0, index)), digits.labels.index_select(0, index));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }

  const at::NoGradGuard no_grad;
  const auto test = digits.pictures.size(0) - kTrain;
  const auto logits = net->forward(digits.pictures.narrow(0, kTrain, test));
  const auto labels = digits.labels.narrow(0, kTrain, test);
  const auto final_loss = at::cross_entropy_loss(logits, labels).item<double>();
  const auto accuracy = logits.argmax(1).eq(labels).to(at::kDouble).mean().item<double>();
  std::ofstream file(out);
  TORCH_CHECK(file, "cannot write ", out);
  file << nlohmann::ordered_json{
      {"lr", lr}, {"final", final_loss}, {"test_accuracy", accuracy}, {"losses", losses}};
  std::printf(
      "digits (C++): cross entropy, test: %.5g, %.1f%% right\n", final_loss, accuracy * 100);
}

} // namespace

int main(int argc, char** argv) {
  try {
    TORCH_CHECK(argc == 4, "usage: digits DATA OUT LR");
    run(argv[1], argv[2], std::stod(argv[3]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "digits: %s\n", error.what());
    return 1;
  }
  return 0;
}
