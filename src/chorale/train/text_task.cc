#include "chorale/train/text_task.h"

#include <algorithm>
#include <array>

#include "chorale/io/file.h"

namespace chorale::train {

double mean_loss(Task& task, Loader& batches, const comm::Group& group) {
  std::array<double, 2> sums = {};  // loss, batches
  int64_t index = 0;
  for (const auto& batch : batches) {
    if (index++ % group.size() != group.rank()) continue;
    sums[0] += task.forward(batch).loss.item<float>();
    sums[1] += 1;
  }
  group.all_reduce(std::span<double>(sums)).wait();
  return sums[0] / sums[1];
}

void list_options(TextTaskOptions& options, const char* model, TrainOptions& common, OptionTable& table) {
  common.epochs = 3;
  common.batch = 16;
  common.warmup = 50;
  common.clip = 1;
  common.evaluate_every = common.checkpoint_every = 250;
  list_options(options.text, table);
  ShapeOptions& shape = options.shape;
  table.add({.name = "layers", .help = "of the model", .target = &shape.layers, .least = 1});
  table.add({.name = "heads", .help = "of each layer's attention", .target = &shape.heads, .least = 1});
  table.add({.name = "width", .help = "numbers that stand for a token", .target = &shape.width, .least = 1});
  table.add(
      {.name = "dropout", .help = "share of numbers left out in training", .target = &shape.dropout, .most = 0.999});
  table.add({.name = "model-config",
             .help = concat("the model's shape from a config.json of ", model, " instead"),
             .target = &shape.model_config,
             .value_name = "FILE"});
}

void check_fits(int64_t model_vocabulary, int64_t tokenizer_vocabulary, int64_t model_context, int64_t context) {
  CHORALE_CHECK(model_vocabulary >= tokenizer_vocabulary, "[train] the model has ", model_vocabulary,
                " tokens, the tokenizer ", tokenizer_vocabulary, "; choose another --tokenizer or a smaller --vocab");
  CHORALE_CHECK(model_context >= context, "[train] the model sees ", model_context, " tokens at most, not ", context,
                "; choose a smaller --context");
}

void settle(TextTaskOptions& options, const std::string& init) {
  // What can be wrong is found now, so that one process complains and not each rank.
  for (const std::string& file : options.text.files) io::MappedFile::open(file);
  choose_tokenizer(options.text, init);
  const ShapeOptions& shape = options.shape;
  std::string& config = options.shape.model_config;
  if (config.starts_with('{')) return;  // of a run that goes on
  if (config.empty() && init.empty()) {
    CHORALE_CHECK(shape.width % shape.heads == 0, "[train] a width of ", shape.width, " cannot be dealt to ",
                  shape.heads, " heads equally; choose a multiple of ", shape.heads);
    return;
  }
  const auto file = io::MappedFile::open(config.empty() ? init + "/config.json" : config);
  config = file->text().substr(std::min(file->text().find('{'), file->text().size()));
}

}  // namespace chorale::train
