// Elements arranged anew: triangles, padding and its gradient, overlapping windows put together.
template <class U>
__global__ void triangle(const U* x, U* y, i64 elems, i64 rows, i64 columns, i64 diagonal, i64 upper) {
  FOR_EACH_ELEMENT(i, elems) {
    const i64 column = i % columns, edge = i / columns % rows + diagonal;
    const bool kept = upper ? column >= edge : column <= edge;
    y[i] = kept ? x[i] : U{};
  }
}

// Where a padded index comes from; -1: from nowhere. `i` is counted from the first unpadded element.
// mode: PadMode in kernel/shape_attrs.h.
__device__ __forceinline__ i64 source_of(i64 i, i64 size, i64 mode) {
  if (i >= 0 && i < size) return i;
  if (mode == 0) return -1;
  if (mode == 1) return i < 0 ? -i : 2 * (size - 1) - i;
  return i < 0 ? 0 : size - 1;
}
struct Padding {
  i64 dims, mode;
  i64 sizes[8], padded[8], before[8];
};
template <class U>
__global__ void pad(const U* x, U* y, i64 elems, const U value, const Padding p) {
  FOR_EACH_ELEMENT(i, elems) {
    i64 rest = i, at = 0, stride = 1;
    for (int d = (int)p.dims - 1; d >= 0 && at >= 0; --d) {
      const i64 next = rest / p.padded[d],
                source = source_of(rest - next * p.padded[d] - p.before[d], p.sizes[d], p.mode);
      at = source < 0 ? -1 : at + source * stride;
      stride *= p.sizes[d];
      rest = next;
    }
    y[i] = at < 0 ? value : x[at];
  }
}
// One dimension: dy [outer, padded, inner] to dx [outer, size, inner]. Each element collects its copies in their order.
template <class T, class O>
__global__ void pad_backward(const T* dy, O* dx, i64 elems, i64 size, i64 padded, i64 inner, i64 before, i64 mode) {
  typedef Compute<T> C;
  FOR_EACH_ELEMENT(i, elems) {
    const i64 at = i / inner % size, outer = i / inner / size, j = i % inner;
    C sum = 0;
    const auto add = [&](i64 place) {
      if (place >= 0 && place < padded) sum += widen(dy[(outer * padded + place) * inner + j]);
    };
    if (mode == 1) {
      if (at > 0) add(before - at);
      add(before + at);
      if (at < size - 1) add(before + 2 * (size - 1) - at);
    } else if (mode == 2) {
      const i64 first = at == 0 ? 0 : before + at, last = at == size - 1 ? padded - 1 : before + at;
      for (i64 place = first; place <= last; ++place) add(place);
    } else {
      add(before + at);
    }
    dx[i] = cast<O>(sum);
  }
}
// dy [outer, windows, inner, size] to dx [outer, length, inner].
template <class T>
__global__ void unfold_backward(const T* dy, T* dx, i64 elems, i64 length, i64 inner, i64 windows, i64 size, i64 step) {
  typedef Compute<T> C;
  FOR_EACH_ELEMENT(i, elems) {
    const i64 at = i / inner % length, outer = i / inner / length, j = i % inner;
    const i64 first = at < size ? 0 : (at - size) / step + 1, last = at / step < windows ? at / step : windows - 1;
    C sum = 0;
    for (i64 w = first; w <= last; ++w) sum += widen(dy[((outer * windows + w) * inner + j) * size + at - w * step]);
    dx[i] = cast<T>(sum);
  }
}
