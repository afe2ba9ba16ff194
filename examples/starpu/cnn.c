/* A convolutional network trained by StarPU tasks on images of Fashion-MNIST's shape, with memory from
 *
 *   starpu   starpu_malloc and starpu_free for each array;
 *   arena    an arena of vram, whose reset after each batch unregisters StarPU's handles and releases the
 * arrays; kept     the same, with handles that stay registered: in each batch the arrays have the same
 * addresses.
 *
 *   make run-cnn                                              builds it and prints the comparison
 *   ./cnn [all|starpu|arena|kept [EPOCHS [IMAGES [ROUNDS]]]]   5 epochs, 60000 images, 3 rounds of "all"
 *
 * The images are generated: 28×28 pixels in 10 classes. The network is a convolution (8 filters of 3×3),
 * ReLU, a 2×2 maximum, a dense layer, softmax and cross-entropy. A batch is processed in 4 blocks, each by 8
 * tasks. All arrays of a batch end with the batch. BLOCK_IMAGES is the number of images in a block: 25, or
 * with `make BLOCK_IMAGES=1` one image for each task. All ways compute the same weights to the last bit. Each
 * run is a process of its own, and the ways alternate, so that other work on the machine affects all of them.
 */
#define _GNU_SOURCE
#include <math.h>
#include <starpu.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <vram.h>

#ifndef BLOCK_IMAGES
#define BLOCK_IMAGES 25 /* images that one task processes */
#endif
enum {
  SIDE = 28,
  PIXELS = SIDE * SIDE,
  CLASSES = 10,
  FILTERS = 8,
  WINDOW = 3,
  OUT = SIDE - WINDOW + 1, /* side after the convolution */
  HALF = OUT / 2,          /* and after the maximum */
  CONVOLVED = FILTERS * OUT * OUT,
  POOLED = FILTERS * HALF * HALF,
  KERNEL = FILTERS * WINDOW * WINDOW,
  DENSE = CLASSES * POOLED,
  BLOCKS = 4,
  BLOCK = BLOCK_IMAGES,
  BATCH = BLOCKS * BLOCK,
  MOST_ARRAYS = 64,
  MOST_EPOCHS = 100
};
static const float RATE = 0.05f;

enum { STARPU, ARENA, KEPT, WAYS };
static const char* const NAMES[WAYS] = {"starpu", "arena", "kept"};
static int way;

static void require(int good, const char* what) {
  if (good) return;
  fprintf(stderr, "%s failed%s%s\n", what, way != STARPU ? ": " : "", way != STARPU ? vram_last_error() : "");
  exit(1);
}

/* ---- memory ------------------------------------------------------------------------------------------- */

static vram_device* device;
static vram_pool* pool;
static vram_arena* arena;

static struct {
  starpu_data_handle_t handle;
  void* memory;
  size_t size;
} arrays[MOST_ARRAYS]; /* of the batch, with starpu_malloc; with kept handles, of all batches */
static int count, kept;
static unsigned long arrays_made, requests, registrations;

static void open_memory(void) {
  vram_device_info info = VRAM_DEVICE_INFO_INIT;
  vram_pool_options options = VRAM_POOL_OPTIONS_INIT;
  if (way == STARPU) return;
  require(vram_device_open(NULL, &device) == VRAM_OK, "opening the device");
  require(vram_device_get_info(device, &info) == VRAM_OK, "asking the device");
  options.pinned = info.page_locks; /* for the copies of a GPU; without one, plain host memory */
  if (!info.page_locks && !info.host_accessible) require(0, "finding host memory");
  require(vram_pool_create(device, &options, &pool) == VRAM_OK, "creating the pool");
  require(vram_arena_create(pool, NULL, &arena) == VRAM_OK, "creating the arena");
}

static void close_memory(void) {
  if (way == STARPU) return;
  for (int i = kept; i-- > 0;) starpu_data_unregister(arrays[i].handle);
  require(vram_arena_destroy(arena) == VRAM_OK, "destroying the arena");
  require(vram_pool_destroy(pool) == VRAM_OK, "destroying the pool");
  require(vram_device_close(device) == VRAM_OK, "closing the device");
}

/* Waits for the tasks that use the handle. */
static void unregister(void* handle) { starpu_data_unregister((starpu_data_handle_t)handle); }

static starpu_data_handle_t registered(void* memory, size_t size) {
  starpu_data_handle_t handle;
  ++registrations;
  starpu_vector_data_register(&handle, STARPU_MAIN_RAM, (uintptr_t)memory, (uint32_t)(size / sizeof(float)),
                              sizeof(float));
  return handle;
}

/* The handle of the same array in the last batch, if that was the same. */
static starpu_data_handle_t kept_handle(void* memory, size_t size) {
  require(count < MOST_ARRAYS, "keeping an array");
  if (count == kept || arrays[count].memory != memory || arrays[count].size != size) {
    while (kept > count) unregister(arrays[--kept].handle);
    arrays[kept].handle = registered(memory, size);
    arrays[kept].memory = memory;
    arrays[kept++].size = size;
  }
  return arrays[count++].handle;
}

/* An array of floats that lasts until the end of the batch. */
static starpu_data_handle_t array(size_t length, float** values) {
  const size_t size = length * sizeof(float);
  starpu_data_handle_t handle;
  void* memory = NULL;
  ++arrays_made;
  if (way == STARPU) {
    require(starpu_malloc(&memory, size) == 0, "starpu_malloc");
    ++requests;
  } else {
    require(vram_arena_allocate(arena, size, 0, &memory) == VRAM_OK, "allocating in the arena");
  }
  if (values != NULL) *values = memory;
  if (way == KEPT) return kept_handle(memory, size);
  handle = registered(memory, size);
  if (way == ARENA) {
    require(vram_arena_on_reset(arena, unregister, handle) == VRAM_OK, "registering with the arena");
  } else {
    require(count < MOST_ARRAYS, "keeping an array");
    arrays[count].handle = handle;
    arrays[count].memory = memory;
    arrays[count++].size = size;
  }
  return handle;
}

static void wait_for_tasks(void* unused) {
  (void)unused;
  require(starpu_task_wait_for_all() == 0, "waiting for the tasks");
  count = 0;
}

static void begin_batch(void) {
  if (way == KEPT)
    require(vram_arena_on_reset(arena, wait_for_tasks, NULL) == VRAM_OK, "registering the wait");
}

static void end_batch(void) {
  if (way != STARPU) { /* unregisters or waits, then releases */
    require(vram_arena_reset(arena, 0) == VRAM_OK, "resetting the arena");
    return;
  }
  for (int i = count; i-- > 0;) unregister(arrays[i].handle);
  for (int i = count; i-- > 0;) starpu_free_flags(arrays[i].memory, arrays[i].size, STARPU_MALLOC_PINNED);
  count = 0;
}

/* ---- images ------------------------------------------------------------------------------------------- */

static unsigned char* images; /* IMAGES × PIXELS */
static unsigned char* labels;
static unsigned noise_state;

static unsigned noise(void) {
  noise_state = noise_state * 1664525u + 1013904223u;
  return noise_state >> 8;
}

/* Each class has blobs at places of its own; an image shows them shifted, at its own brightness, with noise.
 */
static void generate(int number) {
  images = malloc((size_t)number * PIXELS);
  labels = malloc((size_t)number);
  require(images != NULL && labels != NULL, "allocating the images");
  noise_state = 1;
  for (int n = 0; n < number; ++n) {
    unsigned char* image = images + (size_t)n * PIXELS;
    const int class = labels[n] = (unsigned char)(noise() % CLASSES);
    const int right = (int)(noise() % 5), down = (int)(noise() % 5), bright = 60 + (int)(noise() % 100);
    for (int y = 0; y < SIDE; ++y)
      for (int x = 0; x < SIDE; ++x) {
        const int u = (x + right) / 4, v = (y + down) / 4;
        const int lit = (u * 7 + v * 3 + class * (u + 2 * v + 1)) % 11 < 4;
        image[y * SIDE + x] = (unsigned char)((lit ? bright : 0) + (int)(noise() % 96));
      }
  }
}

/* ---- tasks -------------------------------------------------------------------------------------------- */

#define AT(number) ((float*)STARPU_VECTOR_GET_PTR(buffers[number]))
#define TASK(name) static void name(void* buffers[], void* argument)

TASK(do_load) { /* x, expected class; the argument is the first image */
  float *x = AT(0), *expected = AT(1);
  int first;
  starpu_codelet_unpack_args(argument, &first);
  for (int i = 0; i < BLOCK * PIXELS; ++i) x[i] = (float)images[(size_t)first * PIXELS + (size_t)i] / 255;
  for (int n = 0; n < BLOCK; ++n) expected[n] = labels[first + n];
}

TASK(do_convolve) { /* x, kernel, out */
  const float *x = AT(0), *kernel = AT(1);
  float* out = AT(2);
  (void)argument;
  memset(out, 0, sizeof(float) * BLOCK * CONVOLVED);
  for (int n = 0; n < BLOCK; ++n)
    for (int f = 0; f < FILTERS; ++f)
      for (int i = 0; i < WINDOW; ++i)
        for (int j = 0; j < WINDOW; ++j) {
          const float factor = kernel[(f * WINDOW + i) * WINDOW + j];
          for (int r = 0; r < OUT; ++r) {
            const float* from = x + n * PIXELS + (r + i) * SIDE + j;
            float* to = out + (n * FILTERS + f) * OUT * OUT + r * OUT;
            for (int c = 0; c < OUT; ++c) to[c] += factor * from[c];
          }
        }
}

TASK(do_rectify) { /* in, out */
  const float* in = AT(0);
  float* out = AT(1);
  (void)argument;
  for (int i = 0; i < BLOCK * CONVOLVED; ++i) out[i] = in[i] > 0 ? in[i] : 0;
}

TASK(do_maximum) { /* in, out, place of the maximum */
  const float* in = AT(0);
  float *out = AT(1), *place = AT(2);
  (void)argument;
  for (int p = 0; p < BLOCK * FILTERS; ++p)
    for (int r = 0; r < HALF; ++r)
      for (int c = 0; c < HALF; ++c) {
        int best = p * OUT * OUT + 2 * r * OUT + 2 * c;
        const int others[3] = {best + 1, best + OUT, best + OUT + 1};
        for (int i = 0; i < 3; ++i)
          if (in[others[i]] > in[best]) best = others[i];
        out[(p * HALF + r) * HALF + c] = in[best];
        place[(p * HALF + r) * HALF + c] = (float)(best - p * OUT * OUT);
      }
}

TASK(do_classify) { /* features, dense weights, expected class, gradient of the scores, loss and hits */
  const float *features = AT(0), *dense = AT(1), *expected = AT(2);
  float *of_scores = AT(3), *result = AT(4);
  (void)argument;
  result[0] = result[1] = 0;
  for (int n = 0; n < BLOCK; ++n) {
    float* scores = of_scores + n * CLASSES;
    float sum = 0;
    int best = 0;
    for (int k = 0; k < CLASSES; ++k) {
      float score = 0;
      for (int i = 0; i < POOLED; ++i) score += dense[k * POOLED + i] * features[n * POOLED + i];
      scores[k] = score;
      if (score > scores[best]) best = k;
    }
    const float most = scores[best];
    for (int k = 0; k < CLASSES; ++k) sum += scores[k] = expf(scores[k] - most);
    for (int k = 0; k < CLASSES; ++k) scores[k] /= sum;
    result[0] -= logf(scores[(int)expected[n]] + 1e-9f);
    result[1] += best == (int)expected[n];
    scores[(int)expected[n]] -= 1;
  }
}

TASK(do_dense_back) { /* features, dense weights, gradient of the scores, gradients of dense and features */
  const float *features = AT(0), *dense = AT(1), *of_scores = AT(2);
  float *of_dense = AT(3), *of_features = AT(4);
  (void)argument;
  memset(of_dense, 0, sizeof(float) * DENSE);
  memset(of_features, 0, sizeof(float) * BLOCK * POOLED);
  for (int n = 0; n < BLOCK; ++n)
    for (int k = 0; k < CLASSES; ++k) {
      const float factor = of_scores[n * CLASSES + k];
      for (int i = 0; i < POOLED; ++i) {
        of_dense[k * POOLED + i] += factor * features[n * POOLED + i];
        of_features[n * POOLED + i] += factor * dense[k * POOLED + i];
      }
    }
}

TASK(do_maximum_back) { /* gradient of the features, place, rectified, gradient of the convolved */
  const float *of_features = AT(0), *place = AT(1), *rectified = AT(2);
  float* of_convolved = AT(3);
  (void)argument;
  memset(of_convolved, 0, sizeof(float) * BLOCK * CONVOLVED);
  for (int p = 0; p < BLOCK * FILTERS; ++p)
    for (int i = 0; i < HALF * HALF; ++i) {
      const int to = p * OUT * OUT + (int)place[p * HALF * HALF + i];
      if (rectified[to] > 0) of_convolved[to] = of_features[p * HALF * HALF + i];
    }
}

TASK(do_convolve_back) { /* x, gradient of the convolved, gradient of the kernel */
  const float *x = AT(0), *of_convolved = AT(1);
  float* of_kernel = AT(2);
  (void)argument;
  memset(of_kernel, 0, sizeof(float) * KERNEL);
  for (int n = 0; n < BLOCK; ++n)
    for (int f = 0; f < FILTERS; ++f)
      for (int i = 0; i < WINDOW; ++i)
        for (int j = 0; j < WINDOW; ++j) {
          float sum = 0;
          for (int r = 0; r < OUT; ++r) {
            const float* from = x + n * PIXELS + (r + i) * SIDE + j;
            const float* by = of_convolved + (n * FILTERS + f) * OUT * OUT + r * OUT;
            for (int c = 0; c < OUT; ++c) sum += by[c] * from[c];
          }
          of_kernel[(f * WINDOW + i) * WINDOW + j] += sum;
        }
}

TASK(do_update) { /* weights, and the gradient of each block; in this order, so that sums are the same */
  float* weights = AT(0);
  const int length = (int)STARPU_VECTOR_GET_NX(buffers[0]);
  (void)argument;
  for (int i = 0; i < length; ++i) {
    float sum = 0;
    for (int block = 0; block < BLOCKS; ++block) sum += AT(1 + block)[i];
    weights[i] -= RATE / BATCH * sum;
  }
}

#define CODELET(name, number, ...)      \
  static struct starpu_codelet name = { \
      .cpu_funcs = {do_##name}, .cpu_funcs_name = {#name}, .nbuffers = number, .modes = {__VA_ARGS__}}
CODELET(load, 2, STARPU_W, STARPU_W);
CODELET(convolve, 3, STARPU_R, STARPU_R, STARPU_W);
CODELET(rectify, 2, STARPU_R, STARPU_W);
CODELET(maximum, 3, STARPU_R, STARPU_W, STARPU_W);
CODELET(classify, 5, STARPU_R, STARPU_R, STARPU_R, STARPU_W, STARPU_W);
CODELET(dense_back, 5, STARPU_R, STARPU_R, STARPU_R, STARPU_W, STARPU_W);
CODELET(maximum_back, 4, STARPU_R, STARPU_R, STARPU_R, STARPU_W);
CODELET(convolve_back, 3, STARPU_R, STARPU_R, STARPU_W);
CODELET(update, 1 + BLOCKS, STARPU_RW, STARPU_R, STARPU_R, STARPU_R, STARPU_R);

static unsigned long tasks;

static void submit(struct starpu_codelet* codelet, const starpu_data_handle_t* handles) {
  struct starpu_task* task = starpu_task_create();
  task->cl = codelet;
  for (int i = 0; i < codelet->nbuffers; ++i) task->handles[i] = handles[i];
  ++tasks;
  require(starpu_task_submit(task) == 0, "submitting a task (is there a CPU worker?)");
}
#define SUBMIT(codelet, ...) submit(&(codelet), (const starpu_data_handle_t[]){__VA_ARGS__})

/* ---- training ----------------------------------------------------------------------------------------- */

static void train_batch(starpu_data_handle_t kernel, starpu_data_handle_t dense, int first, double* loss,
                        double* hits) {
  starpu_data_handle_t of_kernel[BLOCKS], of_dense[BLOCKS], results[BLOCKS];
  float* values[BLOCKS];
  begin_batch();
  for (int block = 0; block < BLOCKS; ++block) {
    const int image = first + block * BLOCK;
    const starpu_data_handle_t x = array(BLOCK * PIXELS, NULL), expected = array(BLOCK, NULL);
    const starpu_data_handle_t convolved = array(BLOCK * CONVOLVED, NULL),
                               rectified = array(BLOCK * CONVOLVED, NULL);
    const starpu_data_handle_t features = array(BLOCK * POOLED, NULL), place = array(BLOCK * POOLED, NULL);
    const starpu_data_handle_t of_scores = array(BLOCK * CLASSES, NULL),
                               of_features = array(BLOCK * POOLED, NULL);
    const starpu_data_handle_t of_convolved = array(BLOCK * CONVOLVED, NULL);
    of_kernel[block] = array(KERNEL, NULL), of_dense[block] = array(DENSE, NULL);
    results[block] = array(2, &values[block]);
    ++tasks;
    require(starpu_task_insert(&load, STARPU_W, x, STARPU_W, expected, STARPU_VALUE, &image, sizeof image,
                               0) == 0,
            "submitting a task (is there a CPU worker?)");
    SUBMIT(convolve, x, kernel, convolved);
    SUBMIT(rectify, convolved, rectified);
    SUBMIT(maximum, rectified, features, place);
    SUBMIT(classify, features, dense, expected, of_scores, results[block]);
    SUBMIT(dense_back, features, dense, of_scores, of_dense[block], of_features);
    SUBMIT(maximum_back, of_features, place, rectified, of_convolved);
    SUBMIT(convolve_back, x, of_convolved, of_kernel[block]);
  }
  SUBMIT(update, kernel, of_kernel[0], of_kernel[1], of_kernel[2], of_kernel[3]);
  SUBMIT(update, dense, of_dense[0], of_dense[1], of_dense[2], of_dense[3]);
  for (int block = 0; block < BLOCKS; ++block) {
    starpu_data_acquire(results[block], STARPU_R);
    *loss += (double)values[block][0], *hits += (double)values[block][1];
    starpu_data_release(results[block]);
  }
  end_batch();
}

typedef struct account {
  double loss[MOST_EPOCHS], accuracy[MOST_EPOCHS];
  unsigned long long weights; /* of all their bits */
  unsigned long arrays, requests, registrations, faults, tasks;
  unsigned long grown_kib, peak_kib; /* resident memory: added by the training; maximum of the process */
  double seconds, user_seconds, system_seconds;
  unsigned workers;
  unsigned cuda_workers;
} account;

static unsigned long resident_kib(void) {
  unsigned long pages = 0, resident = 0;
  FILE* file = fopen("/proc/self/statm", "r");
  if (file == NULL) return 0;
  if (fscanf(file, "%lu %lu", &pages, &resident) != 2) resident = 0;
  fclose(file);
  return resident * (unsigned long)sysconf(_SC_PAGESIZE) / 1024;
}

static double seconds_of(struct timeval time) { return (double)time.tv_sec + 1e-6 * (double)time.tv_usec; }

static starpu_data_handle_t weights_of(float* values, int length, float scale) {
  starpu_data_handle_t handle;
  for (int i = 0; i < length; ++i) values[i] = scale * ((float)(noise() % 10000) / 5000 - 1);
  starpu_vector_data_register(&handle, STARPU_MAIN_RAM, (uintptr_t)values, (uint32_t)length, sizeof(float));
  return handle;
}

static unsigned long long mixed(unsigned long long sum, const float* values, int length) {
  for (int i = 0; i < length; ++i) {
    uint32_t bits;
    memcpy(&bits, &values[i], sizeof bits);
    sum = (sum ^ bits) * 1099511628211ull;
  }
  return sum;
}

static account train(int epochs, int number) {
  static float kernel_values[KERNEL], dense_values[DENSE];
  account account = {.weights = 0};
  struct timespec begun, ended;
  struct rusage before, after;
  unsigned long resident;
  starpu_data_handle_t kernel, dense;

  open_memory();
  generate(number);
  require(starpu_init(NULL) == 0, "starpu_init");
  noise_state = 7;
  kernel = weights_of(kernel_values, KERNEL, 0.3f), dense = weights_of(dense_values, DENSE, 0.03f);
  account.workers = starpu_cpu_worker_get_count();
  account.cuda_workers = starpu_cuda_worker_get_count();
  resident = resident_kib();
  getrusage(RUSAGE_SELF, &before);
  clock_gettime(CLOCK_MONOTONIC, &begun);
  for (int epoch = 0; epoch < epochs; ++epoch) {
    double loss = 0, hits = 0;
    const int used = number / BATCH * BATCH;
    for (int first = 0; first < used; first += BATCH) train_batch(kernel, dense, first, &loss, &hits);
    account.loss[epoch] = loss / used, account.accuracy[epoch] = 100 * hits / used;
  }
  clock_gettime(CLOCK_MONOTONIC, &ended);
  getrusage(RUSAGE_SELF, &after);
  if (way != STARPU) {
    vram_arena_stats stats = VRAM_ARENA_STATS_INIT;
    require(vram_arena_get_stats(arena, &stats) == VRAM_OK, "asking the arena");
    requests = (unsigned long)stats.requests;
  }
  account.seconds = (double)(ended.tv_sec - begun.tv_sec) + 1e-9 * (double)(ended.tv_nsec - begun.tv_nsec);
  account.user_seconds = seconds_of(after.ru_utime) - seconds_of(before.ru_utime);
  account.system_seconds = seconds_of(after.ru_stime) - seconds_of(before.ru_stime);
  account.faults = (unsigned long)(after.ru_minflt - before.ru_minflt);
  account.peak_kib = (unsigned long)after.ru_maxrss;
  account.grown_kib = account.peak_kib > resident ? account.peak_kib - resident : 0;
  account.arrays = arrays_made, account.requests = requests, account.tasks = tasks;
  account.registrations = registrations;
  starpu_data_unregister(kernel), starpu_data_unregister(dense);
  account.weights = mixed(mixed(0, kernel_values, KERNEL), dense_values, DENSE);
  close_memory();
  starpu_shutdown();
  free(images), free(labels);
  return account;
}

/* ---- the comparison ----------------------------------------------------------------------------------- */

static account train_apart(int which, int epochs, int number) {
  account account;
  int ends[2], status = 0;
  pid_t child;
  fflush(stdout);
  require(pipe(ends) == 0 && (child = fork()) >= 0, "starting a process");
  if (child == 0) {
    way = which;
    account = train(epochs, number);
    _exit(write(ends[1], &account, sizeof account) == (ssize_t)sizeof account ? 0 : 1);
  }
  close(ends[1]);
  require(read(ends[0], &account, sizeof account) == (ssize_t)sizeof account, "training");
  close(ends[0]);
  require(waitpid(child, &status, 0) == child && status == 0, "training");
  return account;
}

static void print_run(const account* run) {
  printf("%-8s %8.2f s, %8.2f s user, %8.2f s system, %10lu page faults, %8lu KiB for the training\n",
         NAMES[way], run->seconds, run->user_seconds, run->system_seconds, run->faults, run->grown_kib);
  fflush(stdout);
}

static int ascending(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double processor_seconds(const account* run) { return run->user_seconds + run->system_seconds; }

static void print_counts(const char* title, unsigned long a, unsigned long b, unsigned long c) {
  printf("%-36s %14lu %14lu %14lu\n", title, a, b, c);
}

static void print_ratio(const char* title, double ratios[][64], int rounds) {
  printf("%-36s %14s", title, "1");
  for (int which = ARENA; which < WAYS; ++which) {
    qsort(ratios[which], (size_t)rounds, sizeof(double), ascending);
    printf("   %.3f (%.3f to %.3f)", ratios[which][rounds / 2], ratios[which][0], ratios[which][rounds - 1]);
  }
  printf("\n");
}

static int compare(int epochs, int number, int rounds) {
  static account runs[WAYS];
  static double wall[WAYS][64], processor[WAYS][64];
  const account *a = &runs[STARPU], *b = &runs[ARENA], *c = &runs[KEPT];
  int same = 1;
  for (int round = 0; round < rounds; ++round) {
    for (int turn = 0; turn < WAYS; ++turn) { /* each begins in turn */
      way = (round + turn) % WAYS;
      runs[way] = train_apart(way, epochs, number);
      print_run(&runs[way]);
    }
    for (int which = ARENA; which < WAYS; ++which) {
      same &= runs[which].weights == a->weights;
      wall[which][round] = runs[which].seconds / a->seconds;
      processor[which][round] = processor_seconds(&runs[which]) / processor_seconds(a);
    }
  }
  printf("\n%d epochs of %d images, %lu tasks of up to %d images, on %u CPU workers and %u CUDA workers\n",
         epochs, number, a->tasks, BLOCK, a->workers, a->cuda_workers);
  for (int epoch = 0; epoch < epochs; ++epoch)
    printf("epoch %d: average loss %.6f, accuracy %.2f %%\n", epoch, a->loss[epoch], a->accuracy[epoch]);
  printf("\n%-36s %14s %14s %14s\n", "", NAMES[0], NAMES[1], NAMES[2]);
  print_counts("arrays", a->arrays, b->arrays, c->arrays);
  print_counts("requests for their memory", a->requests, b->requests, c->requests);
  print_counts("registrations of handles", a->registrations, b->registrations, c->registrations);
  print_counts("page faults in the training", a->faults, b->faults, c->faults);
  print_counts("KiB resident, added by the training", a->grown_kib, b->grown_kib, c->grown_kib);
  print_counts("KiB resident, maximum", a->peak_kib, b->peak_kib, c->peak_kib);
  print_ratio("wall time, median ratio (range)", wall, rounds);
  print_ratio("processor time, median ratio (range)", processor, rounds);
  printf("\nSame weights to the last bit: %s.\n", same ? "yes" : "NO");
  return same ? 0 : 1;
}

int main(int given, char** arguments) {
  const char* which = given > 1 ? arguments[1] : "all";
  const int epochs = given > 2 ? atoi(arguments[2]) : 5, number = given > 3 ? atoi(arguments[3]) : 60000;
  const int rounds = given > 4 ? atoi(arguments[4]) : 3;
  for (way = 0; way < WAYS && strcmp(which, NAMES[way]) != 0;) ++way;
  if ((way == WAYS && strcmp(which, "all") != 0) || epochs < 1 || epochs > MOST_EPOCHS || number < BATCH ||
      rounds < 1 || rounds > 64) {
    fprintf(stderr, "usage: %s [all|starpu|arena|kept [EPOCHS [IMAGES [ROUNDS]]]], with at least %d images\n",
            arguments[0], BATCH);
    return 2;
  }
  if (way == WAYS) return compare(epochs, number, rounds);
  {
    const account alone = train(epochs, number);
    print_run(&alone);
    printf("loss %.6f, accuracy %.2f %%; weights %016llx\n", alone.loss[epochs - 1],
           alone.accuracy[epochs - 1], alone.weights);
  }
  return 0;
}
