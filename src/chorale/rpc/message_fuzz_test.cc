#include "chorale/api/api.h"
#include "chorale/rpc/message.h"
#include "chorale/testing/fuzz_test_util.h"

namespace chorale::rpc {
namespace {

struct Nested {
  std::vector<std::map<std::string, std::optional<Tensor>>> maps;
  std::tuple<int, std::vector<bool>, std::string> rest;
  Tensor tensor;
  CHORALE_MESSAGE(Nested, maps, rest, tensor)
};

std::string seed(const Nested& value) {
  Writer writer;
  write(writer, value);
  const Tensor parcel =
      pack({.kind = MessageKind::kCall, .id = 1, .payload = writer.payload, .tensors = writer.tensors}, 0).parcel;
  return {reinterpret_cast<const char*>(parcel.raw()), static_cast<size_t>(parcel.elems())};
}

std::vector<std::string> seeds() {
  const Tensor x = Tensor::from<float>({1, 2, 3, 4, 5, 6}, {2, 3});
  const Tensor sparse =
      Tensor::sparse_coo(Tensor::from<int64_t>({0, 1, 1, 2}, {2, 2}), Tensor::from<float>({1, 2}, {2}), {3, 3}, true);
  return {seed({}), seed({{{{"a", x}, {"b", std::nullopt}}}, {3, {true, false}, "text"}, narrow(x, 1, 1, 1)}),
          seed({{}, {-1, {}, ""}, sparse})};
}

CHORALE_FUZZ(RpcMessages, seeds()) {
  const Tensor parcel =
      Tensor::from<uint8_t>(std::span<const uint8_t>(reinterpret_cast<const uint8_t*>(input.data()), input.size()),
                            {static_cast<int64_t>(input.size())});
  Incoming incoming(parcel);
  // Nobody sends what it promises; the sizes are bounded by the receiver.
  CHORALE_CHECK(incoming.apart().empty(), "large tensors");
  const Message message = incoming.unpack({});
  for (const Tensor& x : message.tensors) {
    if (!x.is_sparse()) x.to_vector<double>();
  }
  Reader reader(message.payload, message.tensors);
  read<Nested>(reader);
  reader.finish();
}

}  // namespace
}  // namespace chorale::rpc
