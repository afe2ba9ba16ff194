/* A small network trained by StarPU tasks, twice: with malloc, and with vram. Same numbers, less allocation.
 *
 *   make run                  builds it and prints the comparison
 *   ./network malloc          one of the two by itself; a number behind it is the count of iterations
 *   ./network vram
 *
 * Memory has two owners here, and each gets the tool that fits it:
 *   - What StarPU allocates by itself (temporary data, starpu_malloc) has lifetimes that only StarPU knows.
 * It comes from a pool, through starpu_malloc_set_hooks.
 *   - What the program works on in one iteration all ends with the iteration. It lies in an arena. A handle
 * of StarPU points into it, so each handle is registered with vram_arena_on_reset: the reset unregisters it,
 *     which waits for the tasks that use it, and only then the memory is reused. With malloc, the program
 *     keeps a list of handles and pointers for that.
 *
 * The pool is page-locked for a GPU where there is one, so everything above is: one piece, locked once, in
 * place of a starpu_memory_pin for each buffer. (Do not pin it again: the driver refuses what is locked
 * already.)
 */
#define _GNU_SOURCE
#include <errno.h>
#include <starpu.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <vram.h>

enum { BATCH = 32, INPUTS = 512, HIDDEN = 128, CLASSES = 10, DEFAULT_ITERATIONS = 60, MOST_HANDLES = 32 };
static const float RATE = 0.1f;
static const size_t ARENA_BYTES = 1 << 20; /* a guess: it grows if that is too little */
static const size_t POOL_BYTES = 2 << 20;  /* at least so much is taken, and locked, at a time */

static int with_vram;

static void require(int good, const char* what) {
  if (good) return;
  fprintf(stderr, "%s failed%s%s\n", what, with_vram ? ": " : "", with_vram ? vram_last_error() : "");
  exit(1);
}

/* ---- memory ------------------------------------------------------------------------------------------- */

static vram_device* device;
static vram_pool* pool;
static vram_arena* arena;
static unsigned long program_allocations, starpu_allocations; /* asked for; the latter by several threads */

static void open_memory(void) {
  vram_device_info info = VRAM_DEVICE_INFO_INIT;
  vram_pool_options in_pool = VRAM_POOL_OPTIONS_INIT;
  vram_arena_options in_arena = VRAM_ARENA_OPTIONS_INIT;
  if (!with_vram) return;
  in_arena.size = ARENA_BYTES;
  require(vram_device_open(NULL, &device) == VRAM_OK, "opening the device");
  require(vram_device_get_info(device, &info) == VRAM_OK, "asking the device");
  in_pool.pinned = info.page_locks; /* otherwise there is no GPU whose copies it would help */
  in_pool.segment_size = POOL_BYTES;
  require(vram_pool_create(device, &in_pool, &pool) == VRAM_OK, "making the pool");
  require(vram_arena_create(pool, &in_arena, &arena) == VRAM_OK, "making the arena");
}

static vram_pool_stats pool_stats(void) {
  vram_pool_stats stats = VRAM_POOL_STATS_INIT;
  if (with_vram) require(vram_pool_get_stats(pool, &stats) == VRAM_OK, "asking the pool");
  return stats;
}

static void close_memory(void) {
  if (!with_vram) return;
  require(vram_arena_destroy(arena) == VRAM_OK, "ending the arena");
  require(pool_stats().allocations == 0, "getting everything back");
  require(vram_pool_destroy(pool) == VRAM_OK, "ending the pool");
  require(vram_device_close(device) == VRAM_OK, "closing the device");
}

/* The hooks: StarPU calls them from any of its threads. */
static int allocate_hook(unsigned node, void** out, size_t size, int flags) {
  (void)node, (void)flags;
  __atomic_add_fetch(&starpu_allocations, 1, __ATOMIC_RELAXED);
  if (with_vram) return vram_pool_allocate(pool, size, NULL, out) == VRAM_OK ? 0 : -ENOMEM;
  *out = malloc(size);
  return *out != NULL ? 0 : -ENOMEM;
}

static int free_hook(unsigned node, void* memory, size_t size, int flags) {
  (void)node, (void)size, (void)flags;
  if (with_vram) return vram_pool_free(pool, memory) == VRAM_OK ? 0 : -EINVAL;
  free(memory);
  return 0;
}

/* ---- an iteration's data ---------------------------------------------------------------------------------
 */

static struct {
  starpu_data_handle_t handle;
  void* memory;       /* null: StarPU's own */
} here[MOST_HANDLES]; /* with malloc */
static int handles;
static unsigned long submitted, finished; /* tasks */
static unsigned long early_resets;

/* Waits for the tasks that use the handle; then the memory is nobody's but ours. */
static void unregister(void* handle) { starpu_data_unregister((starpu_data_handle_t)handle); }

static starpu_data_handle_t keep(starpu_data_handle_t handle, void* memory) {
  if (with_vram) {
    require(vram_arena_on_reset(arena, unregister, handle) == VRAM_OK, "registering with the arena");
    return handle;
  }
  require(handles < MOST_HANDLES, "keeping a handle");
  here[handles].handle = handle;
  here[handles++].memory = memory;
  return handle;
}

/* A matrix that lasts until the end of the iteration. */
static starpu_data_handle_t matrix(int columns, int rows, float** values) {
  const size_t size = (size_t)columns * (size_t)rows * sizeof(float);
  starpu_data_handle_t handle;
  void* memory = NULL;
  ++program_allocations;
  if (with_vram) {
    require(vram_arena_allocate(arena, size, 0, &memory) == VRAM_OK, "allocating in the arena");
  } else {
    memory = malloc(size);
  }
  require(memory != NULL, "allocating");
  if (values != NULL) *values = memory;
  starpu_matrix_data_register(&handle, STARPU_MAIN_RAM, (uintptr_t)memory, (uint32_t)columns,
                              (uint32_t)columns, (uint32_t)rows, sizeof(float));
  return keep(handle, memory);
}

/* The same, in memory that StarPU allocates where and when a task first writes it. */
static starpu_data_handle_t temporary(int columns, int rows) {
  starpu_data_handle_t handle;
  starpu_matrix_data_register(&handle, -1, 0, (uint32_t)columns, (uint32_t)columns, (uint32_t)rows,
                              sizeof(float));
  return keep(handle, NULL);
}

/* The functions of the arena run in reverse order, so this one, registered first, sees all handles released.
 */
static void note_early(void* unused) {
  (void)unused;
  early_resets += __atomic_load_n(&finished, __ATOMIC_ACQUIRE) != submitted;
}

static void begin_iteration(void) {
  if (with_vram)
    require(vram_arena_on_reset(arena, note_early, NULL) == VRAM_OK, "registering with the arena");
}

static void end_iteration(void) {
  if (with_vram) {
    require(vram_arena_reset(arena, 0) == VRAM_OK, "resetting the arena");
    return;
  }
  for (int i = 0; i < handles; ++i) unregister(here[i].handle);
  note_early(NULL);
  for (int i = 0; i < handles; ++i) free(here[i].memory);
  handles = 0;
}

/* ---- tasks --------------------------------------------------------------------------------------------- */

typedef struct view {
  float* values;
  int columns, rows;
} view;

static view view_of(void* buffer) {
  view seen;
  seen.values = (float*)STARPU_MATRIX_GET_PTR(buffer);
  seen.columns = (int)STARPU_MATRIX_GET_NX(buffer);
  seen.rows = (int)STARPU_MATRIX_GET_NY(buffer);
  return seen;
}

/* out = a · b, with a or b transposed: element (r, c) of a is a.values[r * a_row + c * a_column]. */
static void multiply(view a, int a_row, int a_column, view b, int b_row, int b_column, int inner, view out) {
  int r, c, k;
  memset(out.values, 0, sizeof(float) * (size_t)(out.rows * out.columns));
  for (r = 0; r < out.rows; ++r)
    for (k = 0; k < inner; ++k) {
      const float factor = a.values[r * a_row + k * a_column];
      for (c = 0; c < out.columns; ++c)
        out.values[r * out.columns + c] += factor * b.values[k * b_row + c * b_column];
    }
}

static void end_of_task(void) { __atomic_add_fetch(&finished, 1, __ATOMIC_RELEASE); }

static void do_product(void* buffers[], void* unused) {
  const view a = view_of(buffers[0]), b = view_of(buffers[1]), out = view_of(buffers[2]);
  (void)unused;
  multiply(a, a.columns, 1, b, b.columns, 1, a.columns, out);
  end_of_task();
}

static void do_left_transposed(void* buffers[], void* unused) {
  const view a = view_of(buffers[0]), b = view_of(buffers[1]), out = view_of(buffers[2]);
  (void)unused;
  multiply(a, 1, a.columns, b, b.columns, 1, a.rows, out);
  end_of_task();
}

static void do_right_transposed(void* buffers[], void* unused) {
  const view a = view_of(buffers[0]), b = view_of(buffers[1]), out = view_of(buffers[2]);
  (void)unused;
  multiply(a, a.columns, 1, b, 1, b.columns, a.columns, out);
  end_of_task();
}

static void do_rectify(void* buffers[], void* unused) {
  const view in = view_of(buffers[0]), out = view_of(buffers[1]);
  int i;
  (void)unused;
  for (i = 0; i < in.columns * in.rows; ++i) out.values[i] = in.values[i] > 0 ? in.values[i] : 0;
  end_of_task();
}

/* The gradient of in, where out = rectify(in). */
static void do_rectified_back(void* buffers[], void* unused) {
  const view in = view_of(buffers[0]), of_out = view_of(buffers[1]), of_in = view_of(buffers[2]);
  int i;
  (void)unused;
  for (i = 0; i < in.columns * in.rows; ++i) of_in.values[i] = in.values[i] > 0 ? of_out.values[i] : 0;
  end_of_task();
}

/* Squared error against the wanted output: its gradient, and its mean. */
static void do_error(void* buffers[], void* unused) {
  const view got = view_of(buffers[0]), wanted = view_of(buffers[1]), gradient = view_of(buffers[2]),
             loss = view_of(buffers[3]);
  const int count = got.columns * got.rows;
  float sum = 0;
  int i;
  (void)unused;
  for (i = 0; i < count; ++i) {
    const float off = got.values[i] - wanted.values[i];
    sum += off * off;
    gradient.values[i] = 2 * off / (float)got.rows;
  }
  loss.values[0] = sum / (float)count;
  end_of_task();
}

static void do_update(void* buffers[], void* unused) {
  const view weights = view_of(buffers[0]), gradient = view_of(buffers[1]);
  int i;
  (void)unused;
  for (i = 0; i < weights.columns * weights.rows; ++i) weights.values[i] -= RATE * gradient.values[i];
  end_of_task();
}

#define CODELET(function, count, ...)                                                                   \
  {                                                                                                     \
    .cpu_funcs = {function}, .cpu_funcs_name = {#function}, .nbuffers = count, .modes = { __VA_ARGS__ } \
  }
static struct starpu_codelet product = CODELET(do_product, 3, STARPU_R, STARPU_R, STARPU_W);
static struct starpu_codelet left_transposed = CODELET(do_left_transposed, 3, STARPU_R, STARPU_R, STARPU_W);
static struct starpu_codelet right_transposed = CODELET(do_right_transposed, 3, STARPU_R, STARPU_R, STARPU_W);
static struct starpu_codelet rectify = CODELET(do_rectify, 2, STARPU_R, STARPU_W);
static struct starpu_codelet rectified_back = CODELET(do_rectified_back, 3, STARPU_R, STARPU_R, STARPU_W);
static struct starpu_codelet error = CODELET(do_error, 4, STARPU_R, STARPU_R, STARPU_W, STARPU_W);
static struct starpu_codelet update = CODELET(do_update, 2, STARPU_RW, STARPU_R);

static void submit(struct starpu_codelet* codelet, starpu_data_handle_t a, starpu_data_handle_t b,
                   starpu_data_handle_t c, starpu_data_handle_t d) {
  struct starpu_task* task = starpu_task_create();
  starpu_data_handle_t operands[4];
  int i;
  operands[0] = a, operands[1] = b, operands[2] = c, operands[3] = d;
  task->cl = codelet;
  for (i = 0; i < codelet->nbuffers; ++i) task->handles[i] = operands[i];
  ++submitted;
  require(starpu_task_submit(task) == 0, "submitting a task (is there a CPU worker?)");
}

/* ---- training ------------------------------------------------------------------------------------------ */

static unsigned noise_state = 1;
static float noise(void) {
  noise_state = noise_state * 1664525u + 1013904223u;
  return (float)(noise_state >> 8) / (float)(1 << 24) - 0.5f;
}

/* Weights live through all iterations. starpu_malloc asks the hooks. */
static starpu_data_handle_t weights(int columns, int rows, float** values) {
  starpu_data_handle_t handle;
  int i;
  require(starpu_malloc((void**)values, sizeof(float) * (size_t)(columns * rows)) == 0, "starpu_malloc");
  for (i = 0; i < columns * rows; ++i) (*values)[i] = noise() / 4;
  starpu_matrix_data_register(&handle, STARPU_MAIN_RAM, (uintptr_t)*values, (uint32_t)columns,
                              (uint32_t)columns, (uint32_t)rows, sizeof(float));
  return handle;
}

/* Points around one centre for each class. */
static void generate(float* inputs, float* wanted) {
  int row, i;
  for (row = 0; row < BATCH; ++row) {
    const int class = row % CLASSES;
    for (i = 0; i < INPUTS; ++i) inputs[row * INPUTS + i] = (i % CLASSES == class) + noise();
    for (i = 0; i < CLASSES; ++i) wanted[row * CLASSES + i] = i == class;
  }
}

static float train_once(starpu_data_handle_t first, starpu_data_handle_t second) {
  float *inputs, *targets, *loss_value, loss;
  starpu_data_handle_t x, wanted;
  begin_iteration();
  x = matrix(INPUTS, BATCH, &inputs), wanted = matrix(CLASSES, BATCH, &targets);
  starpu_data_handle_t hidden = matrix(HIDDEN, BATCH, NULL), active = matrix(HIDDEN, BATCH, NULL);
  starpu_data_handle_t out = matrix(CLASSES, BATCH, NULL), of_out = matrix(CLASSES, BATCH, NULL);
  starpu_data_handle_t of_active = temporary(HIDDEN, BATCH), of_hidden = temporary(HIDDEN, BATCH);
  starpu_data_handle_t of_first = matrix(HIDDEN, INPUTS, NULL), of_second = matrix(CLASSES, HIDDEN, NULL);
  starpu_data_handle_t loss_handle = matrix(1, 1, &loss_value);

  starpu_data_acquire(x, STARPU_W), starpu_data_acquire(wanted, STARPU_W);
  generate(inputs, targets);
  starpu_data_release(x), starpu_data_release(wanted);

  submit(&product, x, first, hidden, NULL);
  submit(&rectify, hidden, active, NULL, NULL);
  submit(&product, active, second, out, NULL);
  submit(&error, out, wanted, of_out, loss_handle);
  submit(&left_transposed, active, of_out, of_second, NULL);
  submit(&right_transposed, of_out, second, of_active, NULL);
  submit(&rectified_back, hidden, of_active, of_hidden, NULL);
  submit(&left_transposed, x, of_hidden, of_first, NULL);
  submit(&update, second, of_second, NULL, NULL);
  submit(&update, first, of_first, NULL, NULL);

  starpu_data_acquire(loss_handle, STARPU_R);
  loss = *loss_value;
  starpu_data_release(loss_handle);
  /* The last updates write weights, which are not the iteration's; but they read its gradients, whose handles
   * the end releases. So all of its tasks have ended when the memory is reused. */
  end_iteration();
  return loss;
}

/* ---- what it cost ----------------------------------------------------------------------------------------
 */

typedef struct account {
  float first_loss, last_loss;
  unsigned long long weights; /* of all their bits */
  unsigned long tasks, program_allocations, starpu_allocations, early_resets, faults;
  unsigned long requests_first, requests_last; /* for memory of matrices, so far */
  unsigned long pieces;                        /* of memory that the pool took from the system */
  unsigned long held_first, held_last;         /* KiB of the pool after the first iteration and the last */
  unsigned long resident_first, resident_last; /* KiB of the process */
  double seconds, system_seconds;
  unsigned workers;
  int page_locked;
} account;

static unsigned long resident_kib(void) {
  unsigned long pages = 0, resident = 0;
  FILE* file = fopen("/proc/self/statm", "r");
  if (file == NULL) return 0;
  if (fscanf(file, "%lu %lu", &pages, &resident) != 2) resident = 0;
  fclose(file);
  return resident * (unsigned long)sysconf(_SC_PAGESIZE) / 1024;
}

static vram_arena_stats arena_stats(void) {
  vram_arena_stats stats = VRAM_ARENA_STATS_INIT;
  stats.requests = program_allocations; /* of malloc */
  if (with_vram) require(vram_arena_get_stats(arena, &stats) == VRAM_OK, "asking the arena");
  return stats;
}

static unsigned long long mixed(unsigned long long sum, const float* values, int count) {
  int i;
  for (i = 0; i < count; ++i) {
    uint32_t bits;
    memcpy(&bits, &values[i], sizeof bits);
    sum = (sum ^ bits) * 1099511628211ull;
  }
  return sum;
}

static account train(int iterations) {
  account account = {0};
  struct timespec begun, ended;
  struct rusage before, after;
  starpu_data_handle_t first, second;
  float *first_values, *second_values;
  int i;

  /* Before starpu_init: what it allocates first is the hooks', too. */
  open_memory();
  starpu_malloc_set_hooks(allocate_hook, free_hook);
  require(starpu_init(NULL) == 0, "starpu_init");
  first = weights(HIDDEN, INPUTS, &first_values);
  second = weights(CLASSES, HIDDEN, &second_values);

  getrusage(RUSAGE_SELF, &before);
  clock_gettime(CLOCK_MONOTONIC, &begun);
  for (i = 0; i < iterations; ++i) {
    const float loss = train_once(first, second);
    account.last_loss = loss;
    if (i != 0) continue;
    account.first_loss = loss;
    account.held_first = (unsigned long)(pool_stats().reserved / 1024);
    account.requests_first = (unsigned long)arena_stats().requests;
    account.resident_first = resident_kib();
  }
  clock_gettime(CLOCK_MONOTONIC, &ended);
  getrusage(RUSAGE_SELF, &after);

  account.held_last = (unsigned long)(pool_stats().reserved / 1024);
  account.requests_last = (unsigned long)arena_stats().requests;
  account.pieces = (unsigned long)pool_stats().total_segments;
  account.page_locked = arena_stats().pinned;
  account.resident_last = resident_kib();
  account.seconds = (double)(ended.tv_sec - begun.tv_sec) + 1e-9 * (double)(ended.tv_nsec - begun.tv_nsec);
  account.system_seconds = (double)(after.ru_stime.tv_sec - before.ru_stime.tv_sec) +
                           1e-6 * (double)(after.ru_stime.tv_usec - before.ru_stime.tv_usec);
  account.faults = (unsigned long)(after.ru_minflt - before.ru_minflt);
  account.workers = starpu_cpu_worker_get_count();
  account.program_allocations = program_allocations;
  account.starpu_allocations = starpu_allocations;
  account.early_resets = early_resets;
  account.tasks = submitted;

  starpu_data_unregister(first), starpu_data_unregister(second);
  account.weights = mixed(mixed(0, first_values, HIDDEN * INPUTS), second_values, CLASSES * HIDDEN);
  starpu_free_flags(first_values, sizeof(float) * HIDDEN * INPUTS, STARPU_MALLOC_PINNED);
  starpu_free_flags(second_values, sizeof(float) * CLASSES * HIDDEN, STARPU_MALLOC_PINNED);
  starpu_shutdown();
  close_memory();
  return account;
}

/* ---- the comparison --------------------------------------------------------------------------------------
 */

/* Each in a process of its own, so that memory and faults are its own. */
static account train_apart(int vram, int iterations) {
  account account;
  int ends[2], status = 0;
  pid_t child;
  fflush(stdout);
  require(pipe(ends) == 0 && (child = fork()) >= 0, "starting a process");
  if (child == 0) {
    with_vram = vram;
    account = train(iterations);
    _exit(write(ends[1], &account, sizeof account) == (ssize_t)sizeof account ? 0 : 1);
  }
  close(ends[1]);
  require(read(ends[0], &account, sizeof account) == (ssize_t)sizeof account, "training");
  close(ends[0]);
  require(waitpid(child, &status, 0) == child && status == 0, "training");
  return account;
}

static void print_one(const account* each, int iterations) {
  printf("%d iterations: loss %.9g, then %.9g; weights %016llx\n", iterations, (double)each->first_loss,
         (double)each->last_loss, each->weights);
  printf(
      "%lu matrices, %lu requests for memory, %lu of them in the first iteration; %lu resets before their "
      "tasks had ended\n",
      each->program_allocations, each->requests_last, each->requests_first, each->early_resets);
}

static int compare(int iterations) {
  const account plain = train_apart(0, iterations), vram = train_apart(1, iterations);
  const int same = plain.weights == vram.weights && plain.last_loss == vram.last_loss;
  const int constant = vram.held_first == vram.held_last && vram.requests_first == vram.requests_last;
  const int in_time = plain.early_resets == 0 && vram.early_resets == 0;
  printf("%d iterations of %lu tasks on %u workers. Page-locked: %s.\n\n", iterations,
         vram.tasks / (unsigned long)iterations, vram.workers,
         vram.page_locked ? "yes, as a whole, for the GPU" : "no, there is no GPU to copy by itself");
  printf("%-48s %14s %14s\n", "", "malloc", "vram");
  printf("%-48s %14.7g %14.7g\n", "loss of the first iteration", (double)plain.first_loss,
         (double)vram.first_loss);
  printf("%-48s %14.7g %14.7g\n", "loss of the last", (double)plain.last_loss, (double)vram.last_loss);
  printf("%-48s %14lu %14lu\n", "matrices of the program", plain.program_allocations,
         vram.program_allocations);
  printf("%-48s %14lu %14lu\n", "  requests for their memory", plain.requests_last, vram.requests_last);
  printf("%-48s %14lu %14lu\n", "allocations of StarPU, by the hooks", plain.starpu_allocations,
         vram.starpu_allocations);
  printf("%-48s %14s %14lu\n", "pieces taken from the system by the pool", "-", vram.pieces);
  printf("%-48s %14s %14lu\n", "KiB held by the pool after the first iteration", "-", vram.held_first);
  printf("%-48s %14s %14lu\n", "KiB held by the pool after the last", "-", vram.held_last);
  printf("%-48s %14lu %14lu\n", "KiB resident after the first iteration", plain.resident_first,
         vram.resident_first);
  printf("%-48s %14lu %14lu\n", "KiB resident after the last", plain.resident_last, vram.resident_last);
  printf("%-48s %14lu %14lu\n", "page faults in the loop", plain.faults, vram.faults);
  printf("%-48s %14.3f %14.3f\n", "seconds of the system in the loop", plain.system_seconds,
         vram.system_seconds);
  printf("%-48s %14.3f %14.3f\n\n", "seconds of the loop", plain.seconds, vram.seconds);
  printf(
      "Same losses and weights to the last bit: %s. Memory of vram constant after the first iteration: %s.\n",
      same ? "yes" : "NO", constant ? "yes" : "NO");
  printf("Reset only after the tasks had ended: %s.\n", in_time ? "yes" : "NO");
  return same && constant && in_time ? 0 : 1;
}

int main(int count, char** arguments) {
  const char* which = count > 1 ? arguments[1] : "both";
  const int iterations = count > 2 ? atoi(arguments[2]) : DEFAULT_ITERATIONS;
  if (iterations < 1 || (strcmp(which, "both") && strcmp(which, "malloc") && strcmp(which, "vram"))) {
    fprintf(stderr, "usage: %s [both|malloc|vram [ITERATIONS]]\n", arguments[0]);
    return 2;
  }
  if (strcmp(which, "both") == 0) return compare(iterations);
  with_vram = strcmp(which, "vram") == 0;
  {
    const account alone = train(iterations);
    print_one(&alone, iterations);
  }
  return 0;
}
