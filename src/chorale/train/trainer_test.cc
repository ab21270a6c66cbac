#include "chorale/train/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <functional>
#include <limits>

#include "chorale/api/api.h"
#include "chorale/base/parallel_for.h"
#include "chorale/comm/world.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/io/file.h"
#include "chorale/nn/nn.h"
#include "chorale/snapshot/snapshot.h"
#include "chorale/testing/temporary_folder_test_util.h"
#include "chorale/train/job_device.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::train {
namespace {

using testing::HasSubstr;

// What a layer does to numbers that pass through it, from some forward on.
struct Harm {
  int from = 0;  // counted from 1; 0: never
  std::function<Tensor(const Tensor&)> act;
};
class Harmful final : public nn::Module {
 public:
  Harmful(const Harm& harm, const int& forwards) : harm_(&harm), forwards_(&forwards) {}
  const char* type_name() const override { return "Harmful"; }
  void visit_members(nn::MemberVisitor&) override {}
  Tensor forward(const Tensor& x) { return harm_->from > 0 && *forwards_ >= harm_->from ? harm_->act(x) : x; }
  Tensor operator()(const Tensor& x) { return nn::call(*this, x); }

 private:
  const Harm* harm_;
  const int* forwards_;
};

// Learns the sum of eight numbers, with dropout so that random streams matter.
class SumTask final : public Task {
 public:
  SumTask(int interrupt_at, const Harm& harm)
      : model_(nn::Linear(8, 16), nn::ReLU(), Harmful(harm, forwards_), nn::Dropout(0.25), nn::Linear(16, 1)),
        interrupt_at_(interrupt_at) {
    const Tensor x = uniform({40, 8}, -1, 1, DType::kF32, data_numbers_);
    dataset_.emplace(x, sum(x, 1));
  }
  std::string describe() const override { return "sums"; }
  Unit unit() const override { return {"sums", 1}; }
  std::string fingerprint() const override { return "40 sums"; }
  nn::Module& model() override { return model_; }
  int64_t examples() const override { return dataset_->size(); }
  std::shared_ptr<Loader> loader(std::shared_ptr<const data::BatchSampler> batches,
                                 const data::LoaderOptions& options) const override {
    return std::make_shared<data::DataLoader<data::TensorDataset>>(*dataset_, std::move(batches), options);
  }
  Outcome forward(const data::Example& batch) override {
    if (++forwards_ == interrupt_at_) std::raise(SIGINT);
    return {mse_loss(squeeze(model_(batch.x), 1), batch.y)};
  }
  Metrics evaluate(const comm::Group&) override {
    std::vector<int64_t> all(40);
    std::iota(all.begin(), all.end(), 0);
    const data::Example batch = here(dataset_->get_batch(all));
    return {{"test_loss", mse_loss(squeeze(model_(batch.x), 1), batch.y).item<float>()}};
  }

 private:
  Generator data_numbers_{99};
  std::optional<data::TensorDataset> dataset_;
  int forwards_ = 0;
  nn::Sequential model_;
  int interrupt_at_;
};

class SumKind final : public TaskKind {
 public:
  int interrupt_at = 0;
  Harm harm;
  const char* name() const override { return "sums"; }
  const char* help() const override { return ""; }
  void list_options(TrainOptions&, OptionTable&) override {}
  std::unique_ptr<Task> make(const TrainOptions&) const override {
    return std::make_unique<SumTask>(interrupt_at, harm);
  }
};

struct Session {
  SumKind kind;
  TrainOptions options;

  Session() {
    set_thread_count(1);
    options.epochs = 3;
    options.batch = 8;
    options.lr = 0.01;
    options.checkpoint_every = 4;
    options.quiet = true;
  }
  // What it printed is in `printed`.
  Ending run(const std::filesystem::path& folder) {
    OptionTable table;
    list_options(options, table);
    comm::World world(std::make_shared<transport::MemoryStore>(), 0, 1);
    char* text = nullptr;
    size_t size = 0;
    std::FILE* out = open_memstream(&text, &size);
    struct Close {
      std::FILE* file;
      char*& text;
      size_t& size;
      std::string& printed;
      ~Close() {
        std::fclose(file);
        printed.assign(text, size);
        std::free(text);
      }
    } const close{out, text, size, printed};
    Output output(out);
    return train(
        {.kind = kind, .options = options, .table = table, .group = world.group(), .folder = folder, .out = output});
  }
  std::string printed;
};

// Everything that a checkpoint has, in order.
std::string weights(const TemporaryFolder& folder, const std::string& run, int step) {
  const std::string number = std::to_string(step);
  std::string all;
  const snapshot::State state =
      snapshot::read(folder / (run + "/checkpoints/step-" + std::string(8 - number.size(), '0') + number));
  for (const snapshot::TensorChunk& chunk : state.chunks) {
    all += chunk.key;
    all.append(static_cast<const char*>(chunk.local.raw()),
               static_cast<size_t>(chunk.local.elems()) * chunk.local.elem_bytes());
  }
  return all;
}

struct Variant {
  const char* name;
  void (*change)(TrainOptions&);
};
class Resuming : public testing::TestWithParam<Variant> {};

TEST_P(Resuming, EndsWithTheBitsOfARunThatWasNeverInterrupted) {
  const TemporaryFolder folder;
  Session undisturbed;
  GetParam().change(undisturbed.options);
  EXPECT_EQ(undisturbed.run(folder / "a"), Ending::kDone);

  Session first, second;
  first.kind.interrupt_at = 7;  // between checkpoints
  for (Session* session : {&first, &second}) GetParam().change(session->options);
  EXPECT_EQ(first.run(folder / "b"), Ending::kInterrupted);
  EXPECT_THAT(first.printed, HasSubstr("chorale train sums --out " + (folder / "b").string() + " --resume"));
  second.options.resume = true;
  EXPECT_EQ(second.run(folder / "b"), Ending::kDone);
  const std::string expected = weights(folder, "a", 15);
  EXPECT_GT(expected.size(), 1000u);
  EXPECT_TRUE(weights(folder, "b", 15) == expected);
}
INSTANTIATE_TEST_SUITE_P(Variants, Resuming,
                         testing::Values(Variant{"AdamW", [](TrainOptions&) {}},
                                         Variant{"SgdWithCosine",
                                                 [](TrainOptions& o) {
                                                   o.optimizer = "sgd";
                                                   o.schedule = "cosine";
                                                   o.warmup = 3;
                                                 }},
                                         Variant{"LambWithClippingAndAccumulation",
                                                 [](TrainOptions& o) {
                                                   o.optimizer = "lamb";
                                                   o.schedule = "linear";
                                                   o.clip = 0.5;
                                                   o.accumulate = 2;
                                                 }},
                                         Variant{"LossScaling", [](TrainOptions& o) { o.precision = "f16"; }},
                                         Variant{"PowerSgd",
                                                 [](TrainOptions& o) {
                                                   o.precision = "bf16";
                                                   o.compress = "powersgd";
                                                 }}),
                         [](const auto& row) { return std::string(row.param.name); });

// The graphs that a job runs from compute what its ops compute.
TEST(Trainer, ACompiledRunHasTheBitsOfOneThatIsNot) {
  const TemporaryFolder folder;
  Session plain, compiled;
  compiled.options.compile = true;
  EXPECT_EQ(plain.run(folder / "a"), Ending::kDone);
  EXPECT_EQ(compiled.run(folder / "b"), Ending::kDone);
  EXPECT_TRUE(weights(folder, "b", 15) == weights(folder, "a", 15));
  // chorale graph shows them.
  EXPECT_TRUE(std::filesystem::exists(folder / "b" / "graphs" / "forward.txt"));
  EXPECT_FALSE(std::filesystem::exists(folder / "a" / "graphs"));
}

TEST(Trainer, AFolderWithARunIsNotOverwritten) {
  const TemporaryFolder folder;
  Session session;
  session.options.steps = 1;
  session.run(folder / "a");
  EXPECT_THROW(session.run(folder / "a"), InvalidArgument);
}
TEST(Trainer, ResumingWithoutACheckpointBegins) {
  const TemporaryFolder folder;
  Session session;
  session.options.steps = 2;
  session.options.resume = true;
  session.options.quiet = false;
  EXPECT_EQ(session.run(folder / "a"), Ending::kDone);
  EXPECT_THAT(session.printed, HasSubstr("there is no checkpoint yet: starting from the beginning"));
}
// Runs until numbers are not finite; returns the message.
std::string message_of_nan(Session& session, const TemporaryFolder& folder) {
  try {
    session.run(folder / "a");
  } catch (const NotFinite& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(NotFiniteNumbers, InALossStopTheRunBeforeUpdateAndCheckpointAndAreTraced) {
  const TemporaryFolder folder;
  Session session;
  session.options.keep = 1;
  session.kind.harm = {7, [](const Tensor& x) { return x * std::numeric_limits<double>::infinity(); }};
  const std::string message = message_of_nan(session, folder);
  EXPECT_THAT(message, HasSubstr("step 7: the loss is "));
  EXPECT_THAT(message, HasSubstr("on rank 0 it is the output of layer 2 (Harmful)"));
  EXPECT_THAT(message, HasSubstr("checkpoints/step-00000004, is as it was"));
  EXPECT_EQ(Checkpoints(folder / "a").list().size(), 1u);
  // The checkpoint from before the harm leads to the weights of a run without any.
  session.kind.harm = {};
  session.options.resume = true;
  EXPECT_EQ(session.run(folder / "a"), Ending::kDone);
  Session undisturbed;
  EXPECT_EQ(undisturbed.run(folder / "b"), Ending::kDone);
  EXPECT_TRUE(weights(folder, "a", 15) == weights(folder, "b", 15));
}

// The numbers stay as they are, and their gradients become NaN.
Tensor spoil_gradient(const Tensor& x) { return x + sqrt(x * 0) * 0; }

TEST(NotFiniteNumbers, InGradientsAloneStopTheRunToo) {
  for (const double clip : {0.0, 1.0}) {
    const TemporaryFolder folder;
    Session session;
    session.options.clip = clip;
    session.kind.harm = {6, spoil_gradient};
    const std::string message = message_of_nan(session, folder);
    EXPECT_THAT(message, HasSubstr("step 6: a gradient is not finite"));
    EXPECT_THAT(message, HasSubstr("the gradient that layer 2 (Harmful) passes on"));
  }
}

TEST(NotFiniteNumbers, WithLossScalingStopTheRunWhenTheScaleFallsBelowOne) {
  const TemporaryFolder folder;
  Session session;
  session.options.precision = "f16";
  session.options.epochs = 10;
  session.kind.harm = {3, spoil_gradient};
  // From 65,536 it is halved 17 times; each of these steps is skipped.
  EXPECT_THAT(message_of_nan(session, folder), HasSubstr("gradients are not finite even with a loss scale of 0.5"));
}

TEST(NotFiniteNumbers, AreNoMatterWhereTheOptionSaysSo) {
  const TemporaryFolder folder;
  Session session;
  session.options.on_nan = "continue";
  session.kind.harm = {7, spoil_gradient};
  EXPECT_EQ(session.run(folder / "a"), Ending::kDone);
}

TEST(Trainer, PlanDealsABatchToRanksAndPieces) {
  TrainOptions options;
  options.batch = 64;
  options.accumulate = 2;
  options.epochs = 3;
  const Plan plan = make_plan(options, 1000, 4);
  EXPECT_EQ(plan.steps_per_epoch, 15);
  EXPECT_EQ(plan.steps, 45);
  EXPECT_EQ(plan.examples_of_rank, 8);
  EXPECT_THROW(make_plan(options, 1000, 3), InvalidArgument);
  EXPECT_THROW(make_plan(options, 63, 4), InvalidArgument);
}

// `sim` has the CPU's kernels behind streams, and memory that the host cannot touch: whatever reads a tensor of the
// model directly fails there.
TEST(Trainer, TrainsOnADeviceAsOnTheCpu) {
  eager::add_sim_device({.most_delay = std::chrono::microseconds(20)});
  for (const std::string precision : {"f32", "f16"}) {
    const TemporaryFolder folder;
    Session here, there, again;
    for (Session* session : {&here, &there, &again}) {
      session->options.clip = 1;
      session->options.precision = precision;
      session->options.schedule = "constant";  // the first part of a run does not know how long it is
      session->options.device = session == &here ? "cpu" : "sim:1";
    }
    EXPECT_EQ(here.run(folder / "here"), Ending::kDone);
    there.options.steps = 6;
    EXPECT_EQ(there.run(folder / "there"), Ending::kDone);
    EXPECT_THAT(std::string(io::MappedFile::open(folder / "there/metrics.jsonl")->text()),
                HasSubstr("\"device\": \"sim:1\""));
    again.options.resume = true;
    EXPECT_EQ(again.run(folder / "there"), Ending::kDone);
    EXPECT_EQ(weights(folder, "here", 15), weights(folder, "there", 15)) << precision;
  }
}

TEST(Trainer, DevicesThatCannotBeUsedAreRefused) {
  const auto refusal = [](const std::string& device, int64_t tp) {
    TrainOptions options;
    options.device = device;
    options.tp = tp;
    try {
      return concat(device_of(options, 0));
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  EXPECT_THAT(refusal("gpu", 1), HasSubstr("unknown device 'gpu'; expected cpu"));
  EXPECT_THAT(refusal("null", 1), HasSubstr("no memory to train in"));
  EXPECT_THAT(refusal("sim:0", 2), HasSubstr("--tp works on the CPU only"));
  EXPECT_THAT(refusal("cuda:77", 1), HasSubstr("cuda"));
  EXPECT_EQ(refusal("cpu", 2), "cpu");
  TrainOptions options;
  options.fsdp = true;
  options.device = "cuda:0";
  for (const bool offload : {false, true}) {
    options.offload = offload;
    check_ranks(options, 2);
  }
}

}  // namespace
}  // namespace chorale::train
