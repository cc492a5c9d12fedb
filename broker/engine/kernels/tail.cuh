// The end of a decode step's attention, one block for each row and each KV head (or 16 of its query heads): while the first
// tiles of the row's own tail are on their way, four warps merge the partial results of the row's spans, a head each; then they
// attend to the tail, and everything is combined, sinks included.
//
// Tiles of 16 keys go round the warps. Each warp has its own ring of tiles, so that warps never wait for one another; after its
// last tile the ring takes the warp's result.

namespace shared_attention {

constexpr int TAIL_WARPS = 4, TAIL_KEYS = 16;

__host__ __device__ constexpr int tail_heads(int ratio) { return ratio < 16 ? ratio : 16; }
__host__ __device__ constexpr int tail_ring_bytes(int dims, int stages) { return stages * 2 * tile_bytes(TAIL_KEYS, dims); }

// One part of a row's softmax: `maximum` in log2 units, `sum` relative to it.
struct Part {
  float maximum, sum;
};

// One warp sums the partials of one row and head: sum of 2^(log_sum - maximum) * out, this lane's float4 columns of it.
template <int D>
DEVICE Part merge_partials(float4 (&total)[(D + 127) / 128], const float* out, const float* log_sum, long long first, int count,
                           int heads, int lane) {
  constexpr int COLUMNS = (D + 127) / 128, AT_ONCE = 8;
  Part part = {MINUS_INFINITY, 0.f};
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) total[c] = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int base = 0; base < count; base += AT_ONCE) {
    float4 loaded[AT_ONCE][COLUMNS];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        const bool valid = base + i < count && (c * 32 + lane) * 4 < D;
        loaded[i][c] = valid ? *(const float4*)(out + (first + (long long)(base + i) * heads) * D + (c * 32 + lane) * 4)
                             : make_float4(0.f, 0.f, 0.f, 0.f);
      }
    const int mine = base + (lane & (AT_ONCE - 1));
    float weight = mine < count ? log_sum[first + (long long)mine * heads] : MINUS_INFINITY;
    float maximum = weight;
#pragma unroll
    for (int i = AT_ONCE / 2; i; i >>= 1) maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, i));
    maximum = fmaxf(maximum, part.maximum);
    const float reference = maximum == MINUS_INFINITY ? 0.f : maximum;
    const float shrink = exp2_fast(part.maximum - reference);
    weight = exp2_fast(weight - reference);
    part.maximum = maximum;
    part.sum *= shrink;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      total[c].x *= shrink; total[c].y *= shrink; total[c].z *= shrink; total[c].w *= shrink;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const float w = __shfl_sync(0xffffffffu, weight, i);
      part.sum += w;
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        total[c].x = fmaf(w, loaded[i][c].x, total[c].x);
        total[c].y = fmaf(w, loaded[i][c].y, total[c].y);
        total[c].z = fmaf(w, loaded[i][c].z, total[c].z);
        total[c].w = fmaf(w, loaded[i][c].w, total[c].w);
      }
    }
  }
  return part;
}

// accumulator += weights @ values (16 keys x 8 dims). With one half, rows 8 to 15 are known to be zero and have no registers.
template <int HALVES> DEVICE void add_values(float* accumulator, const unsigned (&weights)[4], unsigned v0, unsigned v1) {
  if constexpr (HALVES == 2) {
    multiply_add(accumulator, weights, v0, v1);
  } else {
    float rest[4] = {accumulator[0], accumulator[1], 0.f, 0.f};
    multiply_add(rest, weights, v0, v1);
    accumulator[0] = rest[0];
    accumulator[1] = rest[1];
  }
}

// One warp attends to every fourth 16-key tile of keys [begin, end) and leaves its sums [heads, D] where its ring was.
// `meanwhile` is called when the first copies have started.
template <int D, int HEADS, int STAGES, typename Meanwhile>
DEVICE void attend_tail(Part* parts, float* result, const Element* queries, long long query_head, int heads, const Element* keys,
                        long long key_token, const Element* values, long long value_token, int begin, int end, float scale,
                        int warp, int lane, Meanwhile meanwhile) {
  constexpr int HALVES = HEADS > 8 ? 2 : 1, TILE = tile_bytes(TAIL_KEYS, D);
  const int matrix = lane >> 3, matrix_row = lane & 7, group = lane >> 2, column = 2 * (lane & 3);
  const unsigned ring = shared_address(result);
  auto copy = [&](int tile, int slot) {
    const int first = begin + tile * TAIL_KEYS;
    if (first < end) {
      copy_tile<D, TAIL_KEYS, 32>(ring + slot * 2 * TILE, keys, key_token, first, end, lane);
      copy_tile<D, TAIL_KEYS, 32>(ring + slot * 2 * TILE + TILE, values, value_token, first, end, lane);
    }
    close_copy_group();
  };
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) copy(warp + i * TAIL_WARPS, i);
  meanwhile();

  unsigned query[D / 16][2 * HALVES];
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    const bool valid = group + 8 * h < heads;
    const Element* from = queries + (valid ? group + 8 * h : 0) * query_head + column;
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
      query[step][h] = valid ? *(const unsigned*)(from + step * 16) : 0u;
      query[step][HALVES + h] = valid ? *(const unsigned*)(from + step * 16 + 8) : 0u;
    }
  }
  float accumulator[D / 4 * HALVES];
#pragma unroll
  for (int i = 0; i < D / 4 * HALVES; i++) accumulator[i] = 0.f;
  Softmax<HALVES> softmax;
  softmax.clear();
  const unsigned key_row = ((matrix >> 1) * 8 + matrix_row) * PANEL_ROW, key_swizzle = ((matrix & 1) ^ matrix_row) << 4;
  const unsigned value_row = ((matrix & 1) * 8 + matrix_row) * PANEL_ROW, value_swizzle = ((matrix >> 1) ^ matrix_row) << 4;
  const int nothing_hidden[HALVES] = {};

  int slot = 0;
  for (int tile = warp; begin + tile * TAIL_KEYS < end; tile += TAIL_WARPS) {
    wait_for_copies<STAGES - 1>();
    __syncwarp();
    const unsigned key_tile = ring + slot * 2 * TILE, value_tile = key_tile + TILE;
    float scores[8];
#pragma unroll
    for (int i = 0; i < 8; i++) scores[i] = 0.f;
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
      unsigned key[4];
      const unsigned left[4] = {query[step][0], HALVES == 2 ? query[step][HALVES - 1] : 0u, query[step][HALVES],
                                HALVES == 2 ? query[step][2 * HALVES - 1] : 0u};
      load_matrices(key, step_address<TAIL_KEYS>(key_tile + key_row, key_swizzle, step));
      multiply_add(scores, left, key[0], key[1]);
      multiply_add(scores + 4, left, key[2], key[3]);
    }
    const int first = begin + tile * TAIL_KEYS;
    if (first + TAIL_KEYS > end) mask_scores(scores, nothing_hidden, end, first, lane);
    float shrink[HALVES];
    online_softmax(scores, softmax, shrink, scale);
    unsigned weight[4];
    pack_step(weight, scores, 0);
    if (HALVES == 1) weight[1] = weight[3] = 0u;
#pragma unroll
    for (int i = 0; i < D / 4 * HALVES; i++) accumulator[i] *= shrink[(i >> 1) % HALVES];
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
      unsigned value[4];
      load_matrices_transposed(value, step_address<TAIL_KEYS>(value_tile + value_row, value_swizzle, step));
      add_values<HALVES>(accumulator + 4 * HALVES * step, weight, value[0], value[1]);
      add_values<HALVES>(accumulator + 4 * HALVES * step + 2 * HALVES, weight, value[2], value[3]);
    }
    __syncwarp();
    copy(tile + STAGES * TAIL_WARPS, slot);
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  wait_for_copies<0>();
  __syncwarp();
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    const float sum = quad_sum(softmax.sum[h]);
    const int row = group + 8 * h;
    if (row >= heads) continue;
    if (column == 0) parts[row] = {softmax.maximum[h] * scale, sum};
#pragma unroll
    for (int j = 0; j < D / 8; j++)
      *(float2*)(result + row * D + 8 * j + column) =
          make_float2(accumulator[2 * HALVES * j + 2 * h], accumulator[2 * HALVES * j + 2 * h + 1]);
  }
}

// One row of the batch: where its partials begin (the next row's begin where they end), the slot of its tail, the first token
// in it that is left to attend to, and how many tokens back its window reaches.
struct Row {
  int partials, slot, begin, window;
};

// The arrays of a launch, and where a block finds its own part of them.
struct Tail {
  const Element* queries;
  long long query_row, query_head;
  Segment slab;
  const Row* rows;
  const int* lengths;
  const float* partial_out;
  const float* partial_log_sum;
  const Element* sinks;
  float scale;
};

template <int D, int R, int STAGES, bool SINKS>
DEVICE void tail_and_merge(const Tail& tail, Element* out, unsigned char* buffer) {
  constexpr int HEADS = tail_heads(R), BLOCKS = (R + 15) / 16, PARTS = TAIL_WARPS + 1;
  constexpr int RING = tail_ring_bytes(D, STAGES) / 4, COLUMNS = (D + 127) / 128;
  static_assert(HEADS * D <= RING, "a warp's ring must hold its result");
  __shared__ Part parts[PARTS][HEADS];
  float* results = (float*)buffer;  // one ring for each warp, then the merged spans
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.y;
  const int kv_head = blockIdx.x / BLOCKS, block = blockIdx.x % BLOCKS, all_heads = gridDim.x / BLOCKS * R;
  const int head_base = kv_head * R + block * 16, heads = min(HEADS, R - block * 16);
  const Row self = tail.rows[row];
  const int partials = tail.rows[row + 1].partials - self.partials;
  const int end = tail.lengths[row], begin = max(self.begin, end - self.window);
  const Segment& slab = tail.slab;
  auto merge_spans = [&]() {
#pragma unroll 1
    for (int head = warp; head < heads; head += TAIL_WARPS) {
      float4 total[COLUMNS];
      const Part part = merge_partials<D>(total, tail.partial_out, tail.partial_log_sum,
                                          (long long)self.partials * all_heads + head_base + head, partials, all_heads, lane);
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        if ((c * 32 + lane) * 4 < D) *(float4*)(results + TAIL_WARPS * RING + head * D + (c * 32 + lane) * 4) = total[c];
      if (lane == 0) parts[TAIL_WARPS][head] = part;
    }
  };
  attend_tail<D, HEADS, STAGES>(parts[warp], results + warp * RING, tail.queries + row * tail.query_row + head_base * tail.query_head,
                                tail.query_head, heads, slab.keys + self.slot * slab.key_slot + kv_head * slab.key_head,
                                slab.key_token, slab.values + self.slot * slab.value_slot + kv_head * slab.value_head,
                                slab.value_token, begin, end, tail.scale * LOG2_E, warp, lane, merge_spans);
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < heads * D / 2; i += 32 * TAIL_WARPS) {
    const int head = 2 * i / D, dim = 2 * i % D;
    float maximum = MINUS_INFINITY, sum = 0.f, sink = 0.f;
    float2 total = make_float2(0.f, 0.f);
    if (SINKS) maximum = sink = (float)tail.sinks[head_base + head] * LOG2_E;
#pragma unroll
    for (int p = 0; p < PARTS; p++) maximum = fmaxf(maximum, parts[p][head].maximum);
    const float reference = maximum == MINUS_INFINITY ? 0.f : maximum;
    if (SINKS) sum = exp2_fast(sink - reference);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const float weight = exp2_fast(parts[p][head].maximum - reference);
      const float2 value = *(const float2*)(results + p * RING + head * D + dim);
      sum = fmaf(weight, parts[p][head].sum, sum);
      total.x = fmaf(weight, value.x, total.x);
      total.y = fmaf(weight, value.y, total.y);
    }
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    *(unsigned*)(out + ((long long)row * all_heads + head_base + head) * D + dim) = pack(total.x * inverse, total.y * inverse);
  }
}

}  // namespace shared_attention
