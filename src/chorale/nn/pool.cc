#include "chorale/nn/pool.h"

namespace chorale::nn {
namespace {
double checked_probability(const char* type, double p) {
  CHORALE_CHECK(p >= 0 && p <= 1, "[", type, "] expected a probability between 0 and 1, found ", p);
  return p;
}
}  // namespace

AvgPool1d::AvgPool1d(const IntList& kernel, const AvgPoolOptions& options) : kernel_(kernel), options_(options) {
  CHORALE_CHECK(!options.divisor_override, "[AvgPool1d] divisor_override is for two dimensions");
}

Dropout::Dropout(double p) : p_(checked_probability("Dropout", p)) {}
Dropout2d::Dropout2d(double p) : p_(checked_probability("Dropout2d", p)) {}

}  // namespace chorale::nn
