// Trains a small GPT with muon::Muon or with torch::optim::AdamW alone:
//   train_gpt --optimizer muon --lr 0.004 --out out/muon.jsonl
// examples/python/train_gpt.py is the same program in Python; with Muon the two print equal losses.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <muon/muon.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/version.h>
#include <nlohmann/json.hpp>

#include "gpt/arguments.h"
#include "gpt/corpus.h"
#include "gpt/model.h"
#include "gpt/progress.h"

namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

// Validation batches are the same for every run, whatever its seed.
constexpr std::uint64_t kValidationSeed = 20'240'918;
constexpr double kWeightDecay = 0.1;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const gpt::Arguments& args, gpt::Gpt& model) {
  if (args.optimizer == "muon") {
    return std::make_unique<muon::Muon>(
        muon::group_parameters(*model), muon::MuonOptions(args.lr).weight_decay(kWeightDecay));
  }
  std::vector<at::Tensor> matrices, vectors;
  for (const auto& parameter : model->parameters()) {
    (parameter.dim() >= 2 ? matrices : vectors).push_back(parameter);
  }
  const auto options = [&](double weight_decay) {
    auto result = std::make_unique<torch::optim::AdamWOptions>(args.lr);
    result->betas({0.9, 0.95}).weight_decay(weight_decay);
    return result;
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(matrices), options(kWeightDecay));
  groups.emplace_back(std::move(vectors), options(0.0));
  return std::make_unique<torch::optim::AdamW>(std::move(groups), *options(0.0));
}

/// Linear warm-up over a tenth of the run, then linearly to zero. `step()`
/// sets the rate of the optimizer step that follows it.
class WarmupThenLinear : public torch::optim::LRScheduler {
 public:
  WarmupThenLinear(torch::optim::Optimizer& optimizer, std::int64_t steps)
      : LRScheduler(optimizer), peaks_(get_current_lrs()), steps_(steps) {}

 protected:
  std::vector<double> get_lrs() override {
    auto lrs = peaks_;
    for (auto& lr : lrs) {
      lr *= factor(step_count_);
    }
    return lrs;
  }

 private:
  double factor(std::int64_t step) const {
    const auto warmup = std::max<std::int64_t>(1, steps_ / 10);
    const auto ratio = [](std::int64_t a, std::int64_t b) {
      return static_cast<double>(a) / static_cast<double>(b);
    };
    if (step < warmup) {
      return ratio(step + 1, warmup);
    }
    return steps_ > warmup ? ratio(std::max<std::int64_t>(0, steps_ - step), steps_ - warmup) : 1.0;
  }

  std::vector<double> peaks_;
  std::int64_t steps_;
};

/// One JSON object a line, each with the name of its run.
class Log {
 public:
  Log(const std::filesystem::path& path, std::string run) : file_(path), run_(std::move(run)) {
    TORCH_CHECK(file_, "cannot write ", path);
  }

  void write(const std::string& event, const Json& fields) {
    Json line = {{"run", run_}, {"event", event}};
    line.update(fields);
    file_ << line << '\n' << std::flush;
  }

 private:
  std::ofstream file_;
  std::string run_;
};

double evaluate(const gpt::Arguments& args, gpt::Gpt& model, const at::Tensor& text) {
  const at::NoGradGuard no_grad;
  gpt::Sampler sampler(text, args.batch, args.context, kValidationSeed);
  double sum = 0.0;
  for (std::int64_t i = 0; i < args.eval_batches; ++i) {
    const auto [inputs, targets] = sampler.next();
    sum += model->loss(inputs, targets).item<double>();
  }
  return sum / static_cast<double>(args.eval_batches);
}

/// Sum of all weights' bits: equal for two runs that are bitwise equal.
std::int64_t fingerprint(const gpt::Gpt& model) {
  std::int64_t sum = 0;
  for (const auto& parameter : model->parameters()) {
    sum += parameter.detach().view(at::kInt).sum().item<std::int64_t>();
  }
  return sum;
}

void train(const gpt::Arguments& args, const gpt::Corpus& corpus, Log& log) {
  gpt::Gpt model(gpt::Sizes{corpus.vocabulary, args.context, args.layers, args.width, args.heads});
  const auto seed = static_cast<std::uint64_t>(args.seed);
  model->initialize(seed);
  const auto optimizer = make_optimizer(args, model);
  WarmupThenLinear schedule(*optimizer, args.steps);
  gpt::Sampler sampler(corpus.train, args.batch, args.context, seed);
  double validation_loss = evaluate(args, model, corpus.validation);
  log.write("validation", {{"step", 0}, {"validation_loss", validation_loss}, {"seconds", 0.0}});

  // `seconds` is training alone: validation and logging are left out.
  double seconds = 0.0;
  double optimizer_seconds = 0.0;
  const gpt::Progress progress(args.steps, args.batch * args.context);
  for (std::int64_t step = 1; step <= args.steps; ++step) {
    schedule.step();
    const auto start = Clock::now();
    const auto [inputs, targets] = sampler.next();
    const auto loss = model->loss(inputs, targets);
    optimizer->zero_grad();
    loss.backward();
    const auto before_step = Clock::now();
    optimizer->step();
    const auto end = Clock::now();
    seconds += seconds_between(start, end);
    optimizer_seconds += seconds_between(before_step, end);

    const double lr = optimizer->param_groups().front().options().get_lr();
    const auto train_loss = loss.item<double>();
    log.write(
        "step", {{"step", step}, {"lr", lr}, {"train_loss", train_loss}, {"seconds", seconds}});
    if (step % args.eval_every == 0 || step == args.steps) {
      validation_loss = evaluate(args, model, corpus.validation);
      log.write(
          "validation",
          {{"step", step}, {"validation_loss", validation_loss}, {"seconds", seconds}});
    }
    progress.update(step, train_loss, validation_loss);
  }
  log.write(
      "end",
      {{"validation_loss", validation_loss},
       {"seconds", seconds},
       {"optimizer_seconds", optimizer_seconds},
       {"weights", fingerprint(model)}});
}

void run(const gpt::Arguments& args) {
  at::set_num_threads(static_cast<int>(args.threads));
  const gpt::Corpus corpus(args.corpus);
  const std::filesystem::path out(args.out);
  if (out.has_parent_path()) {
    std::filesystem::create_directories(out.parent_path());
  }
  Log log(out, args.optimizer + "-cpp");
  log.write(
      "start",
      {{"optimizer", args.optimizer},
       {"lr", args.lr},
       {"steps", args.steps},
       {"seed", args.seed},
       {"batch", args.batch},
       {"context", args.context},
       {"layers", args.layers},
       {"width", args.width},
       {"heads", args.heads},
       {"eval_every", args.eval_every},
       {"eval_batches", args.eval_batches},
       {"threads", args.threads},
       {"torch", TORCH_VERSION}});
  train(args, corpus, log);
}

} // namespace

int main(int argc, char** argv) {
  try {
    run(gpt::parse_arguments(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
  }
  return 0;
}
