/* A C program that uses every part of vram.h on the device it is given (by default the host) and ends with 0
 * if each call kept its promise; after the name "plain" makes its pools do without pages.
 * tests/process/test_c.py builds it against the installed package. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vram.h>

static int broken = 0;
static vram_pool_options ordinary = VRAM_POOL_OPTIONS_INIT;

#define EXPECT(condition)                                                                               \
  do {                                                                                                  \
    if (!(condition)) {                                                                                 \
      if (++broken < 20)                                                                                \
        printf("line %d: %s does not hold; last error: %s\n", __LINE__, #condition, vram_last_error()); \
    }                                                                                                   \
  } while (0)
#define DO(call) EXPECT((call) == VRAM_OK)

#define MIB ((size_t)1 << 20)

/* The memory of a GPU is read and written by copies. */
static unsigned char first_byte(vram_device* device, const void* memory, vram_stream stream) {
  unsigned char byte = 0;
  DO(vram_copy(device, &byte, memory, 1, stream));
  DO(vram_stream_synchronize(device, stream));
  return byte;
}

static void use_pool(vram_device* device) {
  vram_pool_options options = ordinary;
  vram_pool_stats stats = VRAM_POOL_STATS_INIT;
  vram_oom_report report = VRAM_OOM_REPORT_INIT;
  vram_pool* pool = NULL;
  vram_stream stream = NULL;
  void *small = NULL, *large = NULL, *begin = NULL;
  size_t bytes = 0;

  options.limit = 64 * MIB;
  DO(vram_pool_create(device, &options, &pool));
  DO(vram_stream_create(device, &stream));
  DO(vram_pool_allocate(pool, 1000, NULL, &small));
  DO(vram_pool_allocate_aligned(pool, 5 * MIB, 65536, stream, &large));
  EXPECT((uintptr_t)large % 65536 == 0);
  DO(vram_fill(device, small, 3, 1000, NULL));
  EXPECT(first_byte(device, small, NULL) == 3);

  DO(vram_stream_wait(device, stream, NULL));
  DO(vram_copy(device, large, small, 1000, stream));
  DO(vram_pool_record_stream(pool, small, stream));
  DO(vram_pool_free(pool, small));
  EXPECT(first_byte(device, large, stream) == 3);

  DO(vram_pool_find(pool, (char*)large + 100, &begin, &bytes));
  EXPECT(begin == large && bytes >= 5 * MIB);
  EXPECT(vram_pool_free(pool, (char*)large + 512) == VRAM_BAD_POINTER);
  EXPECT(vram_pool_allocate(pool, 100 * MIB, NULL, &small) == VRAM_OUT_OF_MEMORY);
  EXPECT(strstr(vram_last_error(), "failed to allocate 100.00 MiB") != NULL);
  DO(vram_last_out_of_memory(&report));
  EXPECT(report.requested == 100 * MIB && report.limit == 64 * MIB);

  DO(vram_pool_get_stats(pool, &stats));
  EXPECT(stats.allocations == 1 && stats.allocated >= 5 * MIB && stats.reserved <= 64 * MIB);
  DO(vram_pool_free(pool, large));
  EXPECT(vram_pool_free(pool, large) == VRAM_BAD_POINTER);
  DO(vram_pool_synchronize(pool));
  DO(vram_pool_trim(pool, 0, 1));
  DO(vram_pool_get_stats(pool, &stats));
  EXPECT(stats.reserved == 0 && stats.out_of_memory == 1);
  DO(vram_stream_destroy(device, stream));
  DO(vram_pool_destroy(pool));
  EXPECT(vram_pool_destroy(pool) == VRAM_BAD_HANDLE);
  EXPECT(vram_pool_allocate(pool, 1, NULL, &small) == VRAM_BAD_HANDLE);
}

/* Host memory for copies: from a pool, and the program's own. */
static void use_pinned(vram_device* device) {
  vram_device_info info = VRAM_DEVICE_INFO_INIT;
  vram_pool_options options = ordinary;
  vram_pool_stats stats = VRAM_POOL_STATS_INIT;
  vram_pool *pool = NULL, *host = NULL;
  unsigned char *staged = NULL, *own = malloc(MIB);
  void* there = NULL;

  DO(vram_device_get_info(device, &info));
  options.pinned = 1;
  DO(vram_pool_create(device, &options, &host));
  DO(vram_pool_create(device, &ordinary, &pool));
  DO(vram_pool_allocate(host, MIB, NULL, (void**)&staged));
  DO(vram_pool_allocate(pool, MIB, NULL, &there));
  DO(vram_pool_get_stats(host, &stats));
  EXPECT(stats.pinned == info.page_locks);
  memset(staged, 5, MIB);
  memset(own, 0, MIB);
  DO(vram_pin(device, own, MIB));
  EXPECT(vram_pin(device, own + 100, 100) == VRAM_BAD_ARGUMENT);
  DO(vram_copy(device, there, staged, MIB, NULL));
  DO(vram_copy(device, own, there, MIB, NULL));
  DO(vram_pool_record_stream(host, staged, NULL));
  DO(vram_unpin(device, own)); /* waits for the copies */
  EXPECT(own[0] == 5 && own[MIB - 1] == 5);
  EXPECT(vram_unpin(device, own) == VRAM_BAD_POINTER);
  DO(vram_pool_free(host, staged));
  DO(vram_pool_destroy(host));
  DO(vram_pool_destroy(pool));
  free(own);
}

static int released;

static void release(void* argument) {
  void* memory = NULL;
  EXPECT(vram_arena_allocate((vram_arena*)argument, 1, 0, &memory) == VRAM_IN_CALLBACK);
  ++released;
}

static void use_arena(vram_device* device) {
  vram_arena_options options = VRAM_ARENA_OPTIONS_INIT;
  vram_arena_stats grown = VRAM_ARENA_STATS_INIT, after = VRAM_ARENA_STATS_INIT;
  vram_pool* pool = NULL;
  vram_arena* arena = NULL;
  void *kept = NULL, *part = NULL, *again = NULL, *begin = NULL;
  vram_mark mark;
  size_t bytes = 0;
  int iteration, i;

  DO(vram_pool_create(device, &ordinary, &pool));
  DO(vram_arena_create(pool, &options, &arena));
  for (iteration = 0; iteration < 10; ++iteration) {
    DO(vram_arena_allocate(arena, 100, 0, &kept));
    DO(vram_fill(device, kept, (unsigned char)iteration, 100, NULL));
    for (i = 0; i < 20; ++i) {
      DO(vram_arena_mark(arena, &mark));
      DO(vram_arena_allocate(arena, MIB, 4096, &part));
      EXPECT((uintptr_t)part % 4096 == 0 && (part == again || i == 0));
      again = part;
      EXPECT(vram_arena_reset(arena, 0) == VRAM_BAD_MARK);
      DO(vram_arena_rewind(arena, mark));
      EXPECT(vram_arena_rewind(arena, mark) == VRAM_BAD_MARK);
    }
    for (i = 0; i < 5; ++i) DO(vram_arena_allocate(arena, MIB, 0, &part));
    EXPECT(first_byte(device, kept, NULL) == iteration);
    if (iteration == 1) DO(vram_arena_get_stats(arena, &grown));
    DO(vram_arena_on_reset(arena, release, arena));
    EXPECT(released == iteration);
    DO(vram_arena_reset(arena, iteration == 5));
    EXPECT(released == iteration + 1);
  }
  DO(vram_arena_get_stats(arena, &after));
  EXPECT(after.requests == grown.requests && after.capacity == grown.capacity);
  EXPECT(after.used == 0 && after.resets == 10 && after.high_water >= 5 * MIB && after.marks == 0);
  DO(vram_arena_allocate(arena, 1, 0, &part));
  DO(vram_arena_find(arena, part, &begin, &bytes));
  EXPECT(begin <= part && bytes >= 1);
  DO(vram_arena_destroy(arena));
  EXPECT(vram_arena_allocate(arena, 1, 0, &part) == VRAM_BAD_HANDLE);
  DO(vram_pool_destroy(pool));
}

typedef struct shared {
  vram_pool* pool;
  int number;
} shared;

static void* work(void* argument) {
  const shared* mine = argument;
  vram_arena* arena = NULL;
  void *memory, *held[16] = {NULL};
  int i;
  DO(vram_arena_create(mine->pool, NULL, &arena));
  for (i = 0; i < 2000; ++i) {
    DO(vram_pool_free(mine->pool, held[i % 16])); /* null at first */
    DO(vram_pool_allocate(mine->pool, (size_t)(i * 131 % 9000 + mine->number), NULL, &held[i % 16]));
    DO(vram_arena_allocate(arena, (size_t)(i * 131 % 9000), 0, &memory));
    if (i % 100 == 99) DO(vram_arena_reset(arena, 0));
  }
  for (i = 0; i < 16; ++i) DO(vram_pool_free(mine->pool, held[i]));
  DO(vram_arena_destroy(arena));
  return NULL;
}

static void use_threads(vram_device* device) {
  vram_pool* pool = NULL;
  vram_pool_stats stats = VRAM_POOL_STATS_INIT;
  pthread_t threads[4];
  shared arguments[4];
  int i;
  DO(vram_pool_create(device, &ordinary, &pool));
  for (i = 0; i < 4; ++i) {
    arguments[i].pool = pool;
    arguments[i].number = i;
    EXPECT(pthread_create(&threads[i], NULL, work, &arguments[i]) == 0);
  }
  for (i = 0; i < 4; ++i) pthread_join(threads[i], NULL);
  DO(vram_pool_get_stats(pool, &stats));
  EXPECT(stats.allocations == 0 && stats.total_allocations >= 8000);
  DO(vram_pool_destroy(pool));
}

int main(int count, char** arguments) {
  vram_device* device = NULL;
  vram_device_info info = VRAM_DEVICE_INFO_INIT;
  const char* name = count > 1 ? arguments[1] : "host";
  ordinary.plain = count > 2 && strcmp(arguments[2], "plain") == 0;
  EXPECT(vram_version() == VRAM_VERSION);
  if (vram_device_open(name, &device) != VRAM_OK) {
    printf("%s\n", vram_last_error());
    return 2;
  }
  DO(vram_device_get_info(device, &info));
  use_pool(device);
  use_pinned(device);
  use_arena(device);
  use_threads(device);
  DO(vram_device_synchronize(device));
  DO(vram_device_close(device));
  EXPECT(vram_device_close(device) == VRAM_BAD_HANDLE);
  printf("vram %s on %s: %d broken\n", VRAM_VERSION_TEXT, info.name, broken);
  return broken != 0;
}
