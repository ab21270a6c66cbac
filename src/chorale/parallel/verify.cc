#include "chorale/parallel/verify.h"

#include <algorithm>

#include "chorale/autograd/autograd.h"
#include "chorale/base/error.h"

namespace chorale::parallel {

NamedTensors managed_parameters(const nn::Module& module, const std::vector<std::string>& ignore) {
  NamedTensors parameters = module.named_parameters();
  std::erase_if(parameters, [&](const auto& entry) {
    return !requires_grad(entry.second) || std::find(ignore.begin(), ignore.end(), entry.first) != ignore.end();
  });
  return parameters;
}

std::vector<std::string> parameter_names(const nn::Module& module, const std::vector<Tensor>& tensors,
                                         const std::vector<std::string>& ignore) {
  const NamedTensors own = managed_parameters(module, ignore);
  std::vector<std::string> names(tensors.size());
  for (const auto& [name, parameter] : own) {
    const auto found = std::find_if(tensors.begin(), tensors.end(),
                                    [&, &wanted = parameter](const Tensor& tensor) { return tensor.is(wanted); });
    CHORALE_CHECK(found != tensors.end(), "[ddp] the module's parameter ", name, " is not in the list of ",
                  tensors.size(), " parameters");
    names[static_cast<size_t>(found - tensors.begin())] = name;
  }
  CHORALE_CHECK(own.size() == tensors.size(), "[ddp] a list of ", tensors.size(), " parameters for a module that has ",
                own.size());
  return names;
}

namespace {

// A parameter in numbers, for comparison: dtype, rank, sizes, strides.
constexpr size_t kNumbers = 2 + 2 * kMaxDims;

void append_description(std::vector<int64_t>& numbers, const Tensor& parameter) {
  const size_t start = numbers.size();
  numbers.resize(start + kNumbers, 0);
  numbers[start] = static_cast<int64_t>(parameter.dtype());
  numbers[start + 1] = parameter.dims();
  std::copy(parameter.sizes().begin(), parameter.sizes().end(),
            numbers.begin() + static_cast<std::ptrdiff_t>(start) + 2);
  std::copy(parameter.strides().begin(), parameter.strides().end(),
            numbers.begin() + static_cast<std::ptrdiff_t>(start + 2 + kMaxDims));
}

std::string described(std::span<const int64_t> numbers) {
  const auto rank = static_cast<size_t>(numbers[1]);
  const auto list = [&](size_t start) { return Shape(numbers.subspan(start, rank)); };
  return concat(static_cast<DType>(numbers[0]), " ", list(2), " with strides ", list(2 + kMaxDims));
}

}  // namespace

void verify_parameters(const comm::Group& group, const NamedTensors& parameters) {
  if (!group.is_member()) return;
  const auto size = static_cast<size_t>(group.size());
  // Counts first: what follows has the size that they say.
  const std::vector<int64_t> count{static_cast<int64_t>(parameters.size())};
  std::vector<int64_t> counts(size);
  group.all_gather_into(std::span(counts), std::span(count)).wait();
  for (size_t r = 0; r < size; ++r) {
    CHORALE_CHECK_STATE(counts[r] == count[0], "[ddp] rank ", group.rank(), " has ", count[0],
                        " parameters that require a gradient, but rank ", r, " has ", counts[r],
                        "; every rank must have the same module");
  }
  std::vector<int64_t> own;
  for (const auto& [name, parameter] : parameters) append_description(own, parameter);
  std::vector<int64_t> all(own.size() * size);
  group.all_gather_into(std::span(all), std::span<const int64_t>(own)).wait();
  for (size_t r = 1; r < size; ++r) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const std::span<const int64_t> first(all.data() + i * kNumbers, kNumbers);
      const std::span<const int64_t> other(all.data() + r * own.size() + i * kNumbers, kNumbers);
      CHORALE_CHECK_STATE(std::equal(first.begin(), first.end(), other.begin()), "[ddp] rank ", r, ": parameter ", i,
                          " (", parameters[i].first, ") is ", described(other),
                          ", which does not match rank 0, where it is ", described(first),
                          "; every rank must have the same module");
    }
  }
}

}  // namespace chorale::parallel
