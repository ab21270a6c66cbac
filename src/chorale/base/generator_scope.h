// A default generator for one thread: ranks that are threads of one process draw as ranks that are processes do.
#pragma once

namespace chorale {

class Generator;

// While it lives, default_generator() and manual_seed() of this thread mean `generator`. Without it, two ranks that are
// threads draw from one stream, and the order of their calls decides which numbers each of them gets.
class GeneratorScope {
 public:
  explicit GeneratorScope(Generator& generator);
  ~GeneratorScope();
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;

  // This thread's innermost one, or null.
  static Generator* current();

 private:
  Generator* outer_;
};

}  // namespace chorale
