#include "chorale/reducer/grad_bucket.h"

#include "chorale/base/error.h"

namespace chorale::reducer {

void GradBucket::set_buffer(const Tensor& buffer) {
  CHORALE_CHECK(buffer.defined() && buffer.sizes() == buffer_.sizes(), "[comm hook] the buffer of bucket ", index_,
                " has shape ", buffer_.sizes(), "; it cannot be replaced by ",
                buffer.defined() ? concat("one of shape ", buffer.sizes()) : "an undefined tensor");
  buffer_ = buffer;
}

comm::Future ready_future(const Tensor& value) {
  return comm::Future(comm::Work()).then([value](const Tensors&) { return Tensors{value}; });
}

}  // namespace chorale::reducer
