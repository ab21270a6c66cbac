#include "chorale/base/generator_scope.h"

namespace chorale {
namespace {
constinit thread_local Generator* scoped_generator = nullptr;
}  // namespace

GeneratorScope::GeneratorScope(Generator& generator) : outer_(scoped_generator) { scoped_generator = &generator; }
GeneratorScope::~GeneratorScope() { scoped_generator = outer_; }
Generator* GeneratorScope::current() { return scoped_generator; }

}  // namespace chorale
