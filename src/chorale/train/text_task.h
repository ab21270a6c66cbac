// What tasks on text have in common.
#pragma once

#include "chorale/train/task.h"

namespace chorale::train {

// The mean loss of a task's model over examples from a loader, of which each rank takes every size-th batch. All
// batches are equally large.
double mean_loss(Task& task, Loader& batches, const comm::Group& group);

// The shape of a transformer.
struct ShapeOptions {
  int64_t layers = 4, heads = 4, width = 128;
  double dropout = 0;
  std::string model_config{};  // a file's name, and after read_model_config its content: then that counts instead
};
// `model` is whose config.json can be given, such as "GPT-2".
void list_options(ShapeOptions& options, const char* model, OptionTable& table);

// Replaces the name of a config.json by its content, so that a run can go on without the file. Without a name,
// the content is that of the model in the folder `init`; without that too, it stays empty.
void read_model_config(ShapeOptions& shape, const std::string& init);
// InvalidArgument when the width cannot be dealt to the heads.
void check(const ShapeOptions& shape);
// InvalidArgument when a model of a config.json has too few tokens for the tokenizer, or sees too few at once.
void check_fits(int64_t model_vocabulary, int64_t tokenizer_vocabulary, int64_t model_context, int64_t context);

}  // namespace chorale::train
