/* CUDA's driver as far as `kvtcd.cuda` uses it, for machines without a GPU: memory of the one device is a memfd,
 * which another process of the same user opens by way of /proc. Built by `support.fake_libcuda`.
 *
 * FAKE_CUDA_DEVICES is the number of devices (1), FAKE_CUDA_EXPANDABLE makes memory have no handle, and
 * FAKE_CUDA_FAULT names a call that fails for good after FAKE_CUDA_FAULT_AFTER (0) good ones. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NO_DEVICE = 100, NO_CONTEXT = 201, BAD_HANDLE = 400, NOT_READY = 600, ILLEGAL = 700 };
typedef struct { unsigned char data[64]; } bytes64;
struct allocation { uint64_t base; size_t size; int fd; };
struct handle { pid_t pid; int fd; size_t size; };
struct event { int fd; volatile int *come; };

static struct allocation allocations[256];
static int context = 1;
static __thread void *stack[8];
static __thread int depth;
static int fatal;

static int fault(const char *call) {
  const char *name = getenv("FAKE_CUDA_FAULT"), *after = getenv("FAKE_CUDA_FAULT_AFTER");
  static int seen;
  if (!fatal && name && !strcmp(name, call) && seen++ >= (after ? atoi(after) : 0)) fatal = ILLEGAL;
  return fatal ? fatal : depth ? OK : NO_CONTEXT;
}
#define CHECK() do { int code = fault(__func__); if (code) return code; } while (0)

static struct allocation *find(uint64_t at) {
  for (int i = 0; i < 256; i++)
    if (allocations[i].size && at >= allocations[i].base && at < allocations[i].base + allocations[i].size)
      return &allocations[i];
  return NULL;
}

static int map(int fd, size_t size, uint64_t *at) {
  void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return INVALID;
  for (int i = 0; i < 256; i++)
    if (!allocations[i].size) {
      allocations[i] = (struct allocation){(uint64_t)memory, size, fd};
      *at = (uint64_t)memory;
      return OK;
    }
  return INVALID;
}

static int unmap(uint64_t at) {
  struct allocation *found = find(at);
  if (!found || found->base != at) return INVALID;
  munmap((void *)found->base, found->size);
  close(found->fd);
  found->size = 0;
  return OK;
}

static int open_handle(bytes64 given, struct handle *handle) {
  char path[64];
  memcpy(handle, given.data, sizeof *handle);
  if (handle->pid == getpid()) return -NO_CONTEXT; /* as CUDA does in the process that made it */
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  return fd < 0 ? -BAD_HANDLE : fd;
}

static int devices(void) { const char *n = getenv("FAKE_CUDA_DEVICES"); return n ? atoi(n) : 1; }

int cuInit(unsigned flags) { return flags ? INVALID : OK; }
int cuGetErrorName(int code, const char **name) {
  *name = code == ILLEGAL ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == BAD_HANDLE ? "CUDA_ERROR_INVALID_HANDLE" : "CUDA_ERROR_OTHER";
  return OK;
}
int cuDeviceGetCount(int *count) { *count = devices(); return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, 0xa0 + device, 16); return OK; }
int cuDevicePrimaryCtxRetain(void **made, int device) { *made = &context + device; return fatal; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
int cuCtxPushCurrent_v2(void *made) { stack[depth++] = made; return OK; }
int cuCtxPopCurrent_v2(void **made) { *made = stack[--depth]; return OK; }

int cuPointerGetAttribute(void *data, int attribute, uint64_t at) {
  if (!find(at)) return INVALID;
  if (attribute == 9) *(int *)data = 0;
  else if (attribute == 10) *(char *)data = !getenv("FAKE_CUDA_EXPANDABLE");
  else return INVALID;
  return OK;
}

int cuMemAlloc_v2(uint64_t *at, size_t size) {
  CHECK();
  int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
  return ftruncate(fd, size) ? INVALID : map(fd, size, at);
}
int cuMemFree_v2(uint64_t at) { CHECK(); return unmap(at); }
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t at) {
  CHECK();
  struct allocation *found = find(at);
  if (!found) return INVALID;
  *base = found->base, *size = found->size;
  return OK;
}
int cuMemcpyDtoHAsync_v2(void *host, uint64_t at, size_t size, void *stream) {
  CHECK();
  struct allocation *found = find(at);
  if (!stream || !found || at + size > found->base + found->size) return INVALID;
  memcpy(host, (void *)at, size);
  return OK;
}
int cuMemcpyHtoDAsync_v2(uint64_t at, const void *host, size_t size, void *stream) {
  CHECK();
  struct allocation *found = find(at);
  if (!stream || !found || at + size > found->base + found->size) return INVALID;
  memcpy((void *)at, host, size);
  return OK;
}

int cuIpcGetMemHandle(bytes64 *made, uint64_t at) {
  CHECK();
  struct allocation *found = find(at);
  if (!found || found->base != at) return INVALID;
  struct handle handle = {getpid(), found->fd, found->size};
  memset(made, 0, sizeof *made);
  memcpy(made->data, &handle, sizeof handle);
  return OK;
}
int cuIpcOpenMemHandle_v2(uint64_t *at, bytes64 given, unsigned flags) {
  CHECK();
  struct handle handle;
  if (flags != 1) return INVALID;
  int fd = open_handle(given, &handle);
  return fd < 0 ? -fd : map(fd, handle.size, at);
}
int cuIpcCloseMemHandle(uint64_t at) { CHECK(); return unmap(at); }

static int event_at(int fd, struct event **made) {
  struct event *event = malloc(sizeof *event);
  event->fd = fd;
  event->come = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  *made = event;
  return OK;
}
int cuEventCreate(struct event **made, unsigned flags) {
  CHECK();
  if ((flags & 4) && !(flags & 2)) return INVALID;
  int fd = memfd_create("fake-event", MFD_CLOEXEC), one = 1;
  if (ftruncate(fd, 4096) || pwrite(fd, &one, sizeof one, 0) < 0) return INVALID;
  return event_at(fd, made);
}
int cuIpcGetEventHandle(bytes64 *made, struct event *event) {
  CHECK();
  struct handle handle = {getpid(), event->fd, 0};
  memset(made, 0, sizeof *made);
  memcpy(made->data, &handle, sizeof handle);
  return OK;
}
int cuIpcOpenEventHandle(struct event **made, bytes64 given) {
  CHECK();
  struct handle handle;
  int fd = open_handle(given, &handle);
  return fd < 0 ? -fd : event_at(fd, made);
}
int cuEventRecord(struct event *event, void *stream) { CHECK(); (void)stream; *event->come = 1; return OK; }
int cuEventQuery(struct event *event) { CHECK(); return *event->come ? OK : NOT_READY; }
int cuEventSynchronize(struct event *event) { CHECK(); while (!*event->come) usleep(1000); return OK; }
int cuEventDestroy_v2(struct event *event) {
  CHECK();
  munmap((void *)event->come, 4096);
  close(event->fd);
  free(event);
  return OK;
}
int cuStreamCreate(void **made, unsigned flags) { CHECK(); *made = malloc(1); return flags == 1 ? OK : INVALID; }
int cuStreamSynchronize(void *stream) { CHECK(); return stream ? OK : INVALID; }
int cuStreamDestroy_v2(void *stream) { CHECK(); free(stream); return OK; }
