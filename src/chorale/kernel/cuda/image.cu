// Pooling and resizing of [N, C, H, W] in either order.

// ---- pooling: windows as in kernel/pool_window.h

struct Side {
  i64 kernel, stride, padding, dilation;  // kernel 0: adaptive
  i64 size, outputs;
};
struct Pool {
  i64 samples, channels;
  i64 last;  // whether the channels of a place lie side by side
  Side h, w;
  i64 include_padding, fixed;
  __device__ __forceinline__ i64 step() const { return last ? channels : 1; }  // from a place to the next
};
// Element i of a tensor [N, C, height, width]: its place, and where its plane begins in a tensor of another area.
struct Spot {
  i64 h, w;
  i64 plane, channel;  // planes hold all channels where these lie side by side
  __device__ __forceinline__ i64 begin(const Pool& p, i64 area) const { return plane * area * p.step() + channel; }
};
template <class I>
__device__ __forceinline__ Spot split_spot(const Pool& p, I i, I height, I width) {
  Spot spot;
  spot.channel = 0;
  if (p.last) {
    const I next = i / (I)p.channels;
    spot.channel = i - next * (I)p.channels;
    i = next;
  }
  const I row = i / width;
  spot.w = i - row * width;
  spot.plane = row / height;
  spot.h = row - (I)spot.plane * height;
  return spot;
}
__device__ __forceinline__ Spot spot_of(const Pool& p, i64 i, i64 height, i64 width) {
  return i <= 0x7fffffff ? split_spot<u32>(p, (u32)i, (u32)height, (u32)width) : split_spot<i64>(p, i, height, width);
}
struct Span {
  i64 begin, end, step, padded;
};
__device__ __forceinline__ Span span_of(const Side& s, i64 i) {
  if (s.kernel == 0) {
    const i64 begin = i * s.size / s.outputs, end = ((i + 1) * s.size + s.outputs - 1) / s.outputs;
    return {begin, end, 1, end - begin};
  }
  const i64 reach = (s.kernel - 1) * s.dilation + 1, first = i * s.stride - s.padding;
  const i64 bound = s.size + s.padding, last = first + reach < bound ? first + reach : bound;
  const i64 skipped = first < 0 ? (-first + s.dilation - 1) / s.dilation : 0;
  return {first + skipped * s.dilation, last < s.size ? last : s.size, s.dilation,
          (last - first + s.dilation - 1) / s.dilation};
}
__device__ __forceinline__ i64 count_of(const Span& s) {
  return s.begin < s.end ? (s.end - s.begin + s.step - 1) / s.step : 0;
}
__device__ __forceinline__ double divisor_of(const Pool& p, const Span& rows, const Span& columns) {
  if (p.fixed != 0) return (double)p.fixed;
  return (double)(p.include_padding ? rows.padded * columns.padded : count_of(rows) * count_of(columns));
}
template <class T>
__global__ void pool_largest(const T* x, T* y, i64* indices, const Pool p) {
  typedef Compute<T> C;
  const i64 step = p.step();
  FOR_EACH_ELEMENT(i, p.samples * p.channels * p.h.outputs * p.w.outputs) {
    const Spot spot = spot_of(p, i, p.h.outputs, p.w.outputs);
    const Span rows = span_of(p.h, spot.h), columns = span_of(p.w, spot.w);
    const T* const plane = x + spot.begin(p, p.h.size * p.w.size);
    C best = -C(1) / C(0);
    i64 index = rows.begin * p.w.size + columns.begin;
    for (i64 h = rows.begin; h < rows.end; h += rows.step) {
      for (i64 w = columns.begin; w < columns.end; w += columns.step) {
        const C value = widen(plane[(h * p.w.size + w) * step]);
        if (value > best || value != value) {
          best = value;
          index = h * p.w.size + w;
        }
      }
    }
    y[i] = cast<T>(best);
    indices[i] = index;
  }
}
// How far indices lie before and behind where their window is thought to begin, at `stride` times its number: reach is
// {above, below, left, right}, zeros before. The gradient below then need not look at every window.
struct Strides {
  i64 h, w;
};
// kWide indices of a window lie side by side.
template <int kThreads, int kWide>
__global__ void __launch_bounds__(kThreads)
    reach_of_indices(const i64* indices, i32* reach, const Pool p, const Strides stride, Fault* fault, i64 row) {
  const i64 area = p.h.size * p.w.size;
  struct alignas(kWide > 1 ? 16 : 8) Neighbours {
    i64 at[kWide];
  };
  i32 most[4] = {};
  FOR_EACH_ELEMENT(i, p.samples * p.channels * p.h.outputs * p.w.outputs / kWide) {
    const Neighbours all = *(const Neighbours*)(indices + i * kWide);
    const Spot spot = spot_of(p, i * kWide, p.h.outputs, p.w.outputs);
    const i32 top = (i32)(spot.h * stride.h), left = (i32)(spot.w * stride.w);
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      const i64 index = all.at[j];
      if (index < 0 || index >= area) {
        report(fault, (i32)row, i * kWide + j, index, area);
        continue;
      }
      const i32 h = (i32)((u32)index / (u32)p.w.size), w = (i32)index - h * (i32)p.w.size;
      most[0] = ::max(most[0], top - h);
      most[1] = ::max(most[1], h - top);
      most[2] = ::max(most[2], left - w);
      most[3] = ::max(most[3], w - left);
    }
  }
  for (int k = 0; k < 4; ++k) {
    const i32 all = over_block<Larger>(most[k], 0);
    if (threadIdx.x == 0 && all > 0) atomicMax(reach + k, all);
  }
}
// The windows whose largest element is here, in their order.
template <class T>
__global__ void pool_largest_backward(const T* dy, const i64* indices, T* dx, const i32* reach, const Pool p,
                                      const Strides stride) {
  typedef Compute<T> C;
  const i64 step = p.step();
  const i32 above = reach[0], below = reach[1], left = reach[2], right = reach[3];
  FOR_EACH_ELEMENT(i, p.samples * p.channels * p.h.size * p.w.size) {
    const Spot spot = spot_of(p, i, p.h.size, p.w.size);
    const i64 here = spot.h * p.w.size + spot.w, plane = spot.begin(p, p.h.outputs * p.w.outputs);
    const i32 h = (i32)spot.h, w = (i32)spot.w, sh = (i32)stride.h, sw = (i32)stride.w;
    const i32 top = h > below ? (h - below + sh - 1) / sh : 0, bottom = ::min((h + above) / sh, (i32)p.h.outputs - 1);
    const i32 first = w > right ? (w - right + sw - 1) / sw : 0, last = ::min((w + left) / sw, (i32)p.w.outputs - 1);
    C sum = 0;
    for (i32 a = top; a <= bottom; ++a) {
      for (i32 b = first; b <= last; ++b) {
        const i64 at = plane + (a * p.w.outputs + b) * step;
        if (indices[at] == here) sum += widen(dy[at]);
      }
    }
    dx[i] = cast<T>(sum);
  }
}

// The same where the channels of a place lie side by side: a thread takes a pack of them.
struct PackSpot {
  i64 sample, h, w, channel;
};
template <class T>
__device__ __forceinline__ PackSpot pack_spot(const Pool& p, u32 i, i64 height, i64 width) {
  const u32 packs = (u32)p.channels / Pack16<T>::kCount, place = i / packs, row = place / (u32)width,
            sample = row / (u32)height;
  return {sample, row - sample * (u32)height, place - row * (u32)width, (i - place * packs) * Pack16<T>::kCount};
}
template <class T>
__global__ void pool_largest_packs(const T* x, T* y, i64* indices, const Pool p) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  FOR_EACH_ELEMENT(i, p.samples * p.h.outputs * p.w.outputs * p.channels / kCount) {
    const PackSpot spot = pack_spot<T>(p, (u32)i, p.h.outputs, p.w.outputs);
    const Span rows = span_of(p.h, spot.h), columns = span_of(p.w, spot.w);
    const T* const plane = x + spot.sample * p.h.size * p.w.size * p.channels + spot.channel;
    const i32 begin = (i32)(rows.begin * p.w.size + columns.begin);
    C best[kCount];
    i32 index[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      best[j] = -C(1) / C(0);
      index[j] = begin;
    }
    for (i32 h = (i32)rows.begin; h < (i32)rows.end; h += (i32)rows.step) {
      for (i32 w = (i32)columns.begin; w < (i32)columns.end; w += (i32)columns.step) {
        const i32 here = h * (i32)p.w.size + w;
        const Pack16<T> pack = pack_at(plane, here * p.channels);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const C value = widen(pack.at[j]);
          if (value > best[j] || value != value) {
            best[j] = value;
            index[j] = here;
          }
        }
      }
    }
    Pack16<T> result;
#pragma unroll
    for (int j = 0; j < kCount; ++j) result.at[j] = cast<T>(best[j]);
    *(Pack16<T>*)(y + i * kCount) = result;
#pragma unroll
    for (int j = 0; j < kCount; j += 2) *(Pack16<i64>*)(indices + i * kCount + j) = {index[j], index[j + 1]};
  }
}
template <class T>
__global__ void pool_largest_backward_packs(const T* dy, const i64* indices, T* dx, const i32* reach, const Pool p,
                                            const Strides stride) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const i32 above = reach[0], below = reach[1], left = reach[2], right = reach[3];
  FOR_EACH_ELEMENT(i, p.samples * p.h.size * p.w.size * p.channels / kCount) {
    const PackSpot spot = pack_spot<T>(p, (u32)i, p.h.size, p.w.size);
    const i32 h = (i32)spot.h, w = (i32)spot.w, sh = (i32)stride.h, sw = (i32)stride.w, here = h * (i32)p.w.size + w;
    const i32 top = h > below ? (h - below + sh - 1) / sh : 0, bottom = ::min((h + above) / sh, (i32)p.h.outputs - 1);
    const i32 first = w > right ? (w - right + sw - 1) / sw : 0, last = ::min((w + left) / sw, (i32)p.w.outputs - 1);
    const i64 plane = spot.sample * p.h.outputs * p.w.outputs * p.channels + spot.channel;
    C sum[kCount] = {};
    for (i32 a = top; a <= bottom; ++a) {
      for (i32 b = first; b <= last; ++b) {
        const i64 at = plane + (a * (i32)p.w.outputs + b) * p.channels;
        Pack16<i64> of[kCount / 2];
#pragma unroll
        for (int j = 0; j < kCount; j += 2) of[j / 2] = pack_at(indices, at + j);
        const Pack16<T> slopes = pack_at(dy, at);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          if (of[j / 2].at[j % 2] == here) sum[j] += widen(slopes.at[j]);
        }
      }
    }
    Pack16<T> result;
#pragma unroll
    for (int j = 0; j < kCount; ++j) result.at[j] = cast<T>(sum[j]);
    *(Pack16<T>*)(dx + i * kCount) = result;
  }
}
// The same where windows are two places apart: a thread takes two by two places, which share their windows.
template <class T>
__global__ void __launch_bounds__(256)
    pool_largest_backward_quads(const T* dy, const i64* indices, T* dx, const i32* reach, const Pool p) {
  typedef Compute<T> C;
  const int kCount = Pack16<T>::kCount;
  const i32 H = (i32)p.h.size, W = (i32)p.w.size, above = reach[0], below = reach[1], left = reach[2], right = reach[3];
  const i64 high = (H + 1) / 2, wide = (W + 1) / 2;
  FOR_EACH_ELEMENT(i, p.samples * high * wide * p.channels / kCount) {
    const PackSpot spot = pack_spot<T>(p, (u32)i, high, wide);
    const i32 h = 2 * (i32)spot.h, w = 2 * (i32)spot.w, here = h * W + w;
    const i32 top = h > below ? (h - below + 1) / 2 : 0, bottom = ::min((h + 1 + above) / 2, (i32)p.h.outputs - 1);
    const i32 first = w > right ? (w - right + 1) / 2 : 0, last = ::min((w + 1 + left) / 2, (i32)p.w.outputs - 1);
    const i64 plane = spot.sample * p.h.outputs * p.w.outputs * p.channels + spot.channel;
    C sum[4][kCount] = {};
    for (i32 a = top; a <= bottom; ++a) {
#pragma unroll 2
      for (i32 b = first; b <= last; ++b) {
        const i64 at = plane + (a * (i32)p.w.outputs + b) * p.channels;
        Pack16<i64> of[kCount / 2];
#pragma unroll
        for (int j = 0; j < kCount; j += 2) of[j / 2] = pack_at(indices, at + j);
        const Pack16<T> slopes = pack_at(dy, at);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const i32 behind = (i32)of[j / 2].at[j % 2] - here;
          const C slope = widen(slopes.at[j]);
          if (behind == 0) sum[0][j] += slope;
          if (behind == 1) sum[1][j] += slope;
          if (behind == W) sum[2][j] += slope;
          if (behind == W + 1) sum[3][j] += slope;
        }
      }
    }
    T* const to = dx + (spot.sample * H * W + here) * p.channels + spot.channel;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (h + k / 2 >= H || w + k % 2 >= W) continue;
      Pack16<T> result;
#pragma unroll
      for (int j = 0; j < kCount; ++j) result.at[j] = cast<T>(sum[k][j]);
      *(Pack16<T>*)(to + (k / 2 * W + k % 2) * p.channels) = result;
    }
  }
}
template <class T>
__global__ void pool_mean(const T* x, T* y, const Pool p) {
  typedef Compute<T> C;
  const i64 step = p.step();
  FOR_EACH_ELEMENT(i, p.samples * p.channels * p.h.outputs * p.w.outputs) {
    const Spot spot = spot_of(p, i, p.h.outputs, p.w.outputs);
    const Span rows = span_of(p.h, spot.h), columns = span_of(p.w, spot.w);
    const T* const plane = x + spot.begin(p, p.h.size * p.w.size);
    C sum = 0;
    for (i64 h = rows.begin; h < rows.end; h += rows.step) {
      for (i64 w = columns.begin; w < columns.end; w += columns.step) sum += widen(plane[(h * p.w.size + w) * step]);
    }
    y[i] = cast<T>(sum * (C)(1 / divisor_of(p, rows, columns)));
  }
}
// The windows that may hold place `at`.
__device__ __forceinline__ void windows_around(const Side& s, i64 at, i64& first, i64& last) {
  if (s.kernel == 0) {
    first = at * s.outputs / s.size;
    last = ((at + 1) * s.outputs + s.size - 1) / s.size;
    first = first > 0 ? first - 1 : 0;
  } else {
    const i64 reach = (s.kernel - 1) * s.dilation + 1;
    first = at + s.padding - reach + 1;
    first = first > 0 ? (first + s.stride - 1) / s.stride : 0;
    last = (at + s.padding) / s.stride;
  }
  if (last > s.outputs - 1) last = s.outputs - 1;
}
template <class T>
__global__ void pool_mean_backward(const T* dy, T* dx, const Pool p) {
  typedef Compute<T> C;
  const i64 step = p.step();
  FOR_EACH_ELEMENT(i, p.samples * p.channels * p.h.size * p.w.size) {
    const Spot spot = spot_of(p, i, p.h.size, p.w.size);
    const T* const plane = dy + spot.begin(p, p.h.outputs * p.w.outputs);
    const i64 h = spot.h, w = spot.w;
    i64 top, bottom, left, right;
    windows_around(p.h, h, top, bottom);
    windows_around(p.w, w, left, right);
    C sum = 0;
    for (i64 a = top; a <= bottom; ++a) {
      const Span rows = span_of(p.h, a);
      if (h < rows.begin || h >= rows.end || (h - rows.begin) % rows.step != 0) continue;
      for (i64 b = left; b <= right; ++b) {
        const Span columns = span_of(p.w, b);
        if (w < columns.begin || w >= columns.end || (w - columns.begin) % columns.step != 0) continue;
        sum += widen(plane[(a * p.w.outputs + b) * step]) * (C)(1 / divisor_of(p, rows, columns));
      }
    }
    dx[i] = cast<T>(sum);
  }
}

// [K, channels, kArea] into [K, kArea, channels], or back: a thread takes a pack of channels with all their places.
template <class T, int kArea, bool kForth>
__global__ void turn_channels(const T* x, T* y, i64 packs, i64 channels) {
  const int kCount = Pack16<T>::kCount;
  FOR_EACH_ELEMENT(i, packs) {
    const i64 k = i * kCount / channels, c = i * kCount - k * channels, together = i * kCount * kArea,
              apart = k * channels * kArea + c;
    Pack16<T> in[kArea], out[kArea];
#pragma unroll
    for (int a = 0; a < kArea; ++a) in[a] = pack_at(x, kForth ? together + a * kCount : apart + a * channels);
#pragma unroll
    for (int a = 0; a < kArea; ++a) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if constexpr (kForth) {
          const int from = j * kArea + a;  // its number where places lie together
          out[a].at[j] = in[from / kCount].at[from % kCount];
        } else {
          const int to = a * kCount + j;
          out[a].at[j] = in[to % kArea].at[to / kArea];
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kArea; ++a) *(Pack16<T>*)(y + (kForth ? apart + a * channels : together + a * kCount)) = out[a];
  }
}
// Note [Folded images] in cudnn_convolution.cc: two by two places of [N, H, W, channels], with zeros around, as one of
// 4 times 4 channels.
template <class T>
__global__ void fold_places(const T* x, T* y, i64 places, i64 channels, i64 H, i64 W, i64 height, i64 width, i64 top,
                            i64 left) {
  FOR_EACH_ELEMENT(place, places) {
    const u32 row = (u32)place / (u32)width, sample = row / (u32)height;
    const i32 h = 2 * (i32)(row - sample * (u32)height) - (i32)top,
              w = 2 * (i32)((u32)place - row * (u32)width) - (i32)left;
    struct alignas(16) {
      T at[16];
    } all;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const i32 a = h + k / 2, b = w + k % 2;
      const bool inside = a >= 0 && a < H && b >= 0 && b < W;
      const T* const from = x + ((sample * H + a) * W + b) * channels;
#pragma unroll
      for (int c = 0; c < 4; ++c) all.at[4 * k + c] = inside && c < channels ? from[c] : T{};
    }
    *(decltype(all)*)(y + place * 16) = all;
  }
}
// x [K, height, width, 16] -> y [K, channels, H, W], both folded and not.
template <class T>
__global__ void unfold_places(const T* x, T* y, i64 elems, i64 channels, i64 H, i64 W) {
  const i64 height = (H + 1) / 2, width = (W + 1) / 2;
  FOR_EACH_ELEMENT(i, elems) {
    const i64 w = i % W, h = i / W % H, c = i / (W * H) % channels, k = i / (W * H * channels);
    y[i] = x[((k * height + h / 2) * width + w / 2) * 16 + (h % 2 * 2 + w % 2) * 4 + c];
  }
}

// ---- resizing

struct Resize {
  i64 linear, align_corners;
  double ratio_h, ratio_w;
};
// Where a place of the resized image comes from, along one side: two places of the original and what they weigh.
struct Source {
  i64 first, second;
  double weight;  // of the second
};
__device__ __forceinline__ double step_of(const Resize& r, i64 original, i64 resized, double ratio) {
  if (!r.linear || !r.align_corners) return ratio;
  return resized > 1 ? (double)(original - 1) / (double)(resized - 1) : 0.0;
}
__device__ __forceinline__ Source source_at(const Resize& r, i64 i, i64 original, i64 resized, double ratio) {
  if (!r.linear) {  // in f32, as on the CPU
    const i64 at = (i64)::floorf((float)i * (float)ratio), pixel = at < original - 1 ? at : original - 1;
    return {pixel, pixel, 0.0};
  }
  double at = ((double)i + 0.5) * ratio - 0.5;
  at = at > 0 ? at : 0;
  if (r.align_corners) at = resized > 1 ? (double)i * (double)(original - 1) / (double)(resized - 1) : 0.0;
  const i64 pixel = (i64)at < original - 1 ? (i64)at : original - 1;
  const double weight = at - (double)pixel;
  return {pixel, pixel + 1 < original ? pixel + 1 : original - 1, weight < 1 ? weight : 1.0};
}
// p.h and p.w: size of the original, outputs of what it is resized to.
template <class T>
__global__ void resize(const T* x, T* y, const Pool p, const Resize r) {
  typedef Compute<T> C;
  const i64 step = p.step();
  FOR_EACH_ELEMENT(i, p.samples * p.channels * p.h.outputs * p.w.outputs) {
    const Spot spot = spot_of(p, i, p.h.outputs, p.w.outputs);
    const Source h = source_at(r, spot.h, p.h.size, p.h.outputs, r.ratio_h);
    const Source w = source_at(r, spot.w, p.w.size, p.w.outputs, r.ratio_w);
    const T* const plane = x + spot.begin(p, p.h.size * p.w.size);
    const auto at = [&](i64 row, i64 column) { return widen(plane[(row * p.w.size + column) * step]); };
    if (!r.linear) {
      y[i] = cast<T>(at(h.first, w.first));
      continue;
    }
    const C top = (C)(1 - h.weight), bottom = (C)h.weight, left = (C)(1 - w.weight), right = (C)w.weight;
    y[i] = cast<T>(top * (left * at(h.first, w.first) + right * at(h.first, w.second)) +
                   bottom * (left * at(h.second, w.first) + right * at(h.second, w.second)));
  }
}
// The places of the resized image that may have taken something from place `at` of the original.
__device__ __forceinline__ void takers_of(const Resize& r, i64 at, i64 original, i64 resized, double ratio, i64& first,
                                          i64& last) {
  const double step = step_of(r, original, resized, ratio);
  first = 0;
  last = resized - 1;
  if (step <= 0) return;
  // A place more on either side, whatever is rounded.
  if (at > 0) first = (i64)::floor((double)(at - 1) / step) - 2;
  if (at < original - 1) last = (i64)::ceil((double)(at + 2) / step) + 2;
  first = first > 0 ? first : 0;
  last = last < resized - 1 ? last : resized - 1;
}
__device__ __forceinline__ double share_of(const Source& s, i64 at) {
  return (s.first == at ? 1 - s.weight : 0.0) + (s.second == at ? s.weight : 0.0);
}
template <class T>
__global__ void resize_backward(const T* dy, T* dx, const Pool p, const Resize r) {
  typedef Compute<T> C;
  const i64 step = p.step();
  FOR_EACH_ELEMENT(i, p.samples * p.channels * p.h.size * p.w.size) {
    const Spot spot = spot_of(p, i, p.h.size, p.w.size);
    const T* const plane = dy + spot.begin(p, p.h.outputs * p.w.outputs);
    i64 top, bottom, left, right;
    takers_of(r, spot.h, p.h.size, p.h.outputs, r.ratio_h, top, bottom);
    takers_of(r, spot.w, p.w.size, p.w.outputs, r.ratio_w, left, right);
    C sum = 0;
    for (i64 a = top; a <= bottom; ++a) {
      const C by_row = (C)share_of(source_at(r, a, p.h.size, p.h.outputs, r.ratio_h), spot.h);
      if (by_row == 0) continue;
      for (i64 b = left; b <= right; ++b) {
        const C by_column = (C)share_of(source_at(r, b, p.w.size, p.w.outputs, r.ratio_w), spot.w);
        if (by_column != 0) sum += by_row * by_column * widen(plane[(a * p.w.outputs + b) * step]);
      }
    }
    dx[i] = cast<T>(sum);
  }
}
