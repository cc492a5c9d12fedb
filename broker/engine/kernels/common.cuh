// Building blocks of the decode-attention kernels. The launcher puts above this text: `Element` (__nv_bfloat16 or __half),
// ELEMENT (the same in PTX: "bf16" or "f16").
//
// Tiles lie in shared memory as panels of 64 dims: panel p holds dims 64p .. 64p + 63 of every row, 128 bytes a row, and the
// 16-byte chunk c of row r is stored at chunk c ^ (r % 8). That is the hardware's 128-byte swizzle, so that ldmatrix reads it
// without bank conflicts and wgmma reads it as it is.
//
// Accumulators of mma.sync and of wgmma have one layout: entry 4j + 2h + e of a thread belongs to row lane / 4 + 8h of its
// 16-row block and to column 8j + 2 (lane % 4) + e.

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define MINUS_INFINITY __int_as_float(0xff800000)

namespace shared_attention {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int PANEL_ROW = 128;  // bytes of one row of one panel

__host__ __device__ constexpr int panels(int dims) { return (dims + 63) / 64; }
__host__ __device__ constexpr int tile_bytes(int rows, int dims) { return rows * panels(dims) * PANEL_ROW; }

// One KV segment as the kernel sees it: a shared span, or the slab of the rows' tails.
struct Segment {
  const Element* keys;
  const Element* values;
  long long key_slot, key_head, key_token;
  long long value_slot, value_head, value_token;
};

// One thread block's part of the spans: query rows [folded_begin, folded_end) of a group (row and head folded into one index)
// against keys [key_begin, key_end) of its segment, written as partial `chunk` of each row.
struct Work {
  int segment, slot, first_member, folded_begin, folded_end, key_begin, key_end, chunk;
};

// One row of one group: its index in the batch, the place of its first partial, and length - window_origin = the first key
// that a sliding window lets it see.
struct Member {
  int row, partial, window_origin;
};

DEVICE unsigned shared_address(const void* pointer) { return (unsigned)__cvta_generic_to_shared(pointer); }

// Copies 16 bytes to shared memory without waiting; writes zeros where `valid` is false.
DEVICE void copy_16(unsigned destination, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               ::"r"(destination), "l"(source), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void close_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Four 8 x 8 matrices from shared memory; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address));
}
DEVICE void load_matrices_transposed(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address));
}

// c[0..3] += a (16 x 16) @ b (16 x 8), float32 accumulators.
DEVICE void multiply_add(float* c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT ".f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_fast(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// Two floats rounded into one register, the first in the low half.
DEVICE unsigned pack(float low, float high) {
  unsigned both;
  asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

DEVICE float quad_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Where 16-byte chunk `chunk` of row `row` lies in a tile of ROWS rows.
template <int ROWS> DEVICE unsigned chunk_offset(int row, int chunk) {
  return (chunk >> 3) * (ROWS * PANEL_ROW) + row * PANEL_ROW + (((chunk ^ row) & 7) << 4);
}
// The 16-dim step `step` (two chunks) of a row whose address and swizzle (first chunk ^ row % 8, in bytes) are known.
template <int ROWS> DEVICE unsigned step_address(unsigned row_address, unsigned swizzle, int step) {
  return row_address + (step >> 2) * (ROWS * PANEL_ROW) + (swizzle ^ ((step & 3) << 5));
}

// How THREADS threads share the copy of rows of D dims: LANES threads a row, STRIDE rows a pass.
template <int D, int THREADS> struct CopyShape {
  static constexpr int CHUNKS = D / 8;
  static constexpr int LANES = CHUNKS <= 8 ? 8 : CHUNKS <= 16 ? 16 : 32;
  static constexpr int STRIDE = THREADS / LANES;
};

// Starts the copy of keys [first, first + ROWS) into a tile; rows from `end` on become zeros, and are not read.
template <int D, int ROWS, int THREADS>
DEVICE void copy_tile(unsigned tile, const Element* source, long long token_stride, int first, int end, int thread) {
  using Shape = CopyShape<D, THREADS>;
  const int row = thread / Shape::LANES, chunk = thread % Shape::LANES, left = end - first - row;
  if (Shape::CHUNKS != Shape::LANES && chunk >= Shape::CHUNKS) return;
  const Element* from = source + (first + row) * token_stride + chunk * 8;
  const unsigned to = tile + chunk_offset<ROWS>(row, chunk);
#pragma unroll
  for (int i = 0; i < ROWS / Shape::STRIDE; i++) {
    const int down = i * Shape::STRIDE;
    // Eight rows further the swizzle is the same again.
    copy_16(down % 8 == 0 ? to + down * PANEL_ROW : tile + chunk_offset<ROWS>(row + down, chunk), from, down < left);
    from += Shape::STRIDE * token_stride;
  }
}

// The running softmax of the rows that a thread holds pieces of: `maximum` of the raw scores, `sum` of this thread's share.
template <int HALVES> struct Softmax {
  float maximum[HALVES], sum[HALVES];
  DEVICE_MEMBER void clear() {
#pragma unroll
    for (int h = 0; h < HALVES; h++) { maximum[h] = MINUS_INFINITY; sum[h] = 0.f; }
  }
};

// Hides the keys of a tile outside [begin[h], end). `first` is the position of the tile's first key.
template <int HALVES, int SIZE>
DEVICE void mask_scores(float (&scores)[SIZE], const int (&begin)[HALVES], int end, int first, int lane) {
#pragma unroll
  for (int i = 0; i < SIZE; i++) {
    const int h = (i >> 1) & 1, key = first + (i >> 2) * 8 + 2 * (lane & 3) + (i & 1);
    if (h < HALVES && (key >= end || key < begin[h % HALVES])) scores[i] = MINUS_INFINITY;
  }
}

// Online softmax: turns the scores of one tile into exp2(scale (score - maximum)), and says by how much what was summed
// before must shrink. `scale` holds log2 e.
template <int HALVES, int SIZE>
DEVICE void online_softmax(float (&scores)[SIZE], Softmax<HALVES>& softmax, float (&shrink)[HALVES], float scale) {
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    float even = softmax.maximum[h], odd = MINUS_INFINITY;
#pragma unroll
    for (int j = 0; j < SIZE / 4; j++) {
      even = fmaxf(even, scores[4 * j + 2 * h]);
      odd = fmaxf(odd, scores[4 * j + 2 * h + 1]);
    }
    const float maximum = quad_maximum(fmaxf(even, odd));
    const float reference = maximum == MINUS_INFINITY ? 0.f : maximum * scale;  // a row may see no key yet
    shrink[h] = exp2_fast(fmaf(softmax.maximum[h], scale, -reference));
    softmax.maximum[h] = maximum;
    float even_sum = softmax.sum[h] * shrink[h], odd_sum = 0.f;
#pragma unroll
    for (int j = 0; j < SIZE / 4; j++) {
      const float x = exp2_fast(fmaf(scores[4 * j + 2 * h], scale, -reference));
      const float y = exp2_fast(fmaf(scores[4 * j + 2 * h + 1], scale, -reference));
      scores[4 * j + 2 * h] = x;
      scores[4 * j + 2 * h + 1] = y;
      even_sum += x;
      odd_sum += y;
    }
    softmax.sum[h] = even_sum + odd_sum;
  }
}

// The scores of 16-key step `step` as the left operand (16 rows x 16 keys) of the product with the values.
template <int SIZE> DEVICE void pack_step(unsigned (&operand)[4], const float (&scores)[SIZE], int step) {
#pragma unroll
  for (int i = 0; i < 4; i++) operand[i] = pack(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
}

// Where the two rows of a block that this thread holds are to be written: slot * heads + head; -1 for none.
template <int R>
DEVICE void partial_places(int (&place)[2], const Work& work, const Member* members, int folded, int head_base, int heads, int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = folded + h * 8 + (lane >> 2);
    place[h] = -1;
    if (row < work.folded_end) {
      place[h] = (members[work.first_member + row / R].partial + work.chunk) * heads + head_base + row % R;
    }
  }
}

// Writes this thread's share of a 16-row block: the output, normalised within its keys, and log2 of the softmax's sum.
template <int D>
DEVICE void store_partial(float* out, float* log_sum, const float (&accumulator)[D / 2], const Softmax<2>& softmax, float scale,
                          const int (&place)[2], int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float sum = quad_sum(softmax.sum[h]);
    if (place[h] < 0) continue;
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    float* to = out + (long long)place[h] * D + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < D / 8; j++)
      *(float2*)(to + 8 * j) = make_float2(accumulator[4 * j + 2 * h] * inverse, accumulator[4 * j + 2 * h + 1] * inverse);
    if ((lane & 3) == 0) log_sum[place[h]] = sum > 0.f ? softmax.maximum[h] * scale + log2_fast(sum) : MINUS_INFINITY;
  }
}

// The first key that the sliding window leaves visible, for the two rows of a block that this thread holds.
template <int R>
DEVICE void window_begins(int (&begin)[2], const Work& work, const Member* members, const int* lengths, int folded, int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = min(folded + h * 8 + (lane >> 2), work.folded_end - 1);
    const Member member = members[work.first_member + row / R];
    begin[h] = lengths[member.row] - member.window_origin;
  }
}

}  // namespace shared_attention
