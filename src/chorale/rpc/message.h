// What travels between workers: a kind, values, and tensors apart from them.
//
// Note [Messages on the wire]
// A message is one parcel (comm/message_queue.h): a head, a description of each tensor, the values, the bytes of small
// tensors. A large tensor is a parcel of its own, and lent (Note [Lent parcels] in comm/lent_parcels.h), so that its
// bytes are copied once: from where they are to where the receiver wants them. A caller
// that waits for the result cannot write it meanwhile; one that does not waits until the receiver has it, and gets
// fresh pages if that takes long. Any other tensor that is sent, and that somebody may write, is copied first. A tensor
// that is a view travels as the stretch of memory that it reaches over, and arrives with its strides; one that would
// waste more than half of a large stretch is copied first and arrives contiguous.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "chorale/rpc/codec.h"

namespace chorale::rpc {

enum class MessageKind : uint8_t {
  kReturn,       // the answer to any request
  kError,        // or that it failed
  kRefused,      // the answer to a call that was not run: how many references among its arguments were taken
  kCall,         // run a function, answer with its result
  kOp,           // run an op of the table
  kRemoteCall,   // run a function, keep its result for a reference
  kRemoteOp,     // the same with an op
  kFetch,        // the value behind a reference
  kUserDelete,   // a user of a reference is gone
  kForkRequest,  // there is a new user
  kChildAccept,  // the owner knows the new user
  kGradient,     // of tensors that were sent (distributed autograd)
  kMark,         // which gradients will come
  kSettle,       // no others will
  kAbort,        // a backward has failed
  kCleanup,      // a context has ended
  kRefBackward,  // backward from the value behind a reference
  kGather,       // what all workers, or some, have: at their leader
  kLeave,        // a worker leaves
  kHello,        // a worker has come
  kType,         // of the value behind a reference
};
inline constexpr int kMessageKinds = static_cast<int>(MessageKind::kType) + 1;
std::string_view name_of(MessageKind kind);
inline bool is_request(MessageKind kind) { return kind > MessageKind::kRefused; }
// Control messages are sent again until they are answered (Core::send_control()).
inline bool is_control(MessageKind kind) {
  return (kind >= MessageKind::kUserDelete && kind <= MessageKind::kChildAccept) ||
         (kind >= MessageKind::kSettle && kind <= MessageKind::kCleanup);
}

struct Message {
  MessageKind kind = MessageKind::kReturn;
  uint64_t id = 0;       // of the request, chosen by its sender; its answer has the same
  uint64_t context = 0;  // of distributed autograd; 0: none
  uint64_t hop = 0;      // names the pair of nodes that this message makes in it; 0: no tensor needs a gradient
  uint64_t number = 0;   // of control messages (Note [Control messages] in rpc/control_numbers.h)
  uint64_t chain = 0;    // of requests: that in which it was made (Note [Chains] in rpc/crew.h)
  uint64_t report = 0;   // of answers: what Contexts::report() says
  Bytes payload{};
  std::vector<Tensor> tensors{};
  std::shared_ptr<PassedOn> passed{};  // not on the wire
};

// Tensors of at least this many bytes are parcels of their own.
inline constexpr size_t kApartBytes = 64 << 10;
inline constexpr size_t kMostTensors = 1 << 16;

// What is sent: one parcel, and the bytes of large tensors.
struct Outgoing {
  Tensor parcel;
  std::vector<Tensor> apart;
};
// `tag` names the parcels of large tensors. Throws InvalidArgument for a tensor that cannot travel.
Outgoing pack(const Message& message, uint64_t tag);
// Whether the caller has promised not to write the tensors of such a message.
inline bool is_call(MessageKind kind) { return kind >= MessageKind::kCall && kind <= MessageKind::kRemoteOp; }

// What has come.
class Incoming {
 public:
  // Throws InvalidArgument for anything that pack() does not make.
  explicit Incoming(const Tensor& parcel);
  Incoming(Incoming&&) noexcept;
  ~Incoming();
  // The sizes of the parcels that belong to it.
  const std::vector<size_t>& apart() const { return apart_; }
  uint64_t tag() const { return tag_; }
  uint64_t id() const { return message_.id; }
  MessageKind kind() const { return message_.kind; }
  // Reads a message whose parcels are those, in order.
  Message unpack(const std::vector<Tensor>& apart);

 private:
  struct Part;
  struct Plan;
  Tensor parcel_;
  Message message_;
  std::vector<Plan> plans_;
  std::vector<size_t> apart_;
  uint64_t tag_ = 0;
};

}  // namespace chorale::rpc
