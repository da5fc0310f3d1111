/* Preloaded into a writer: records what reaches a data file, and fails calls on demand.
 *
 * Log record: u8 kind, 7 bytes of zero, u64 offset, u64 length, then the data.
 *   'w' write            'd' write through an O_DSYNC descriptor
 *   's' fsync/fdatasync  't' ftruncate (offset = new length)    'm' mark made by the writer
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MAX_FD 4096
#define META_END 8192 /* two meta pages */

static int log_fd = -1;
static unsigned char tracked[MAX_FD]; /* 0 no, 1 data file, 2 the same through O_DSYNC */
static char fail_kind;
static long fail_after = -1;
static int fail_errno;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("RECORDING");
    if (path) log_fd = REAL(open)(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int of_interest(int fd) { return fd >= 0 && fd < MAX_FD && tracked[fd]; }

static void record(char kind, uint64_t offset, const struct iovec *parts, int count, uint64_t length) {
    if (log_fd < 0) return;
    struct { char kind; char zero[7]; uint64_t offset, length; } head = {kind, {0}, offset, length};
    REAL(write)(log_fd, &head, sizeof head);
    for (int i = 0; i < count && length; i++) {
        uint64_t n = parts[i].iov_len < length ? parts[i].iov_len : length;
        REAL(write)(log_fd, parts[i].iov_base, n);
        length -= n;
    }
}

static void wrote(int fd, const struct iovec *parts, int count, ssize_t done, off_t offset) {
    if (done > 0) record(tracked[fd] == 2 ? 'd' : 'w', offset, parts, count, done);
}

/* Whether this call is the one to fail. */
static int fails(int fd, char kind) {
    if (!of_interest(fd) || kind != fail_kind || fail_after < 0 || fail_after-- > 0) return 0;
    errno = fail_errno;
    return 1;
}

/* For the writer, by ctypes: mark the log; fail a write (w) but of a meta page (m), or a sync (s), `after` others. */
void shim_mark(const char *text) {
    struct iovec part = {(void *)text, strlen(text)};
    record('m', 0, &part, 1, part.iov_len);
}
void shim_fail(char kind, long after, int code) { fail_kind = kind; fail_errno = code; fail_after = after; }
long shim_left(void) { return fail_after; }

static int opened(int fd, const char *path, int flags) {
    size_t n = strlen(path);
    if (fd >= 0 && fd < MAX_FD)
        tracked[fd] = n >= 9 && !strcmp(path + n - 9, "/data.mdb") ? ((flags & O_DSYNC) ? 2 : 1) : 0;
    return fd;
}

#define OPEN(name)                                                                                            \
    int name(const char *path, int flags, ...) {                                                              \
        va_list rest;                                                                                         \
        va_start(rest, flags);                                                                                \
        mode_t mode = va_arg(rest, mode_t);                                                                   \
        va_end(rest);                                                                                         \
        return opened(REAL(name)(path, flags, mode), path, flags);                                            \
    }
OPEN(open)
OPEN(open64)

int close(int fd) {
    if (fd >= 0 && fd < MAX_FD) tracked[fd] = 0;
    return REAL(close)(fd);
}

#define PWRITE(name, type)                                                                                    \
    ssize_t name(int fd, const void *data, size_t length, type offset) {                                      \
        if (fails(fd, offset < META_END ? 'm' : 'w')) return -1;                                              \
        struct iovec part = {(void *)data, length};                                                           \
        ssize_t done = REAL(name)(fd, data, length, offset);                                                  \
        if (of_interest(fd)) wrote(fd, &part, 1, done, offset);                                               \
        return done;                                                                                          \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define PWRITEV(name, type)                                                                                   \
    ssize_t name(int fd, const struct iovec *parts, int count, type offset) {                                 \
        if (fails(fd, 'w')) return -1;                                                                        \
        ssize_t done = REAL(name)(fd, parts, count, offset);                                                  \
        if (of_interest(fd)) wrote(fd, parts, count, done, offset);                                           \
        return done;                                                                                          \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

ssize_t write(int fd, const void *data, size_t length) {
    if (fails(fd, 'w')) return -1;
    off_t offset = of_interest(fd) ? lseek(fd, 0, SEEK_CUR) : 0;
    struct iovec part = {(void *)data, length};
    ssize_t done = REAL(write)(fd, data, length);
    if (of_interest(fd)) wrote(fd, &part, 1, done, offset);
    return done;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (fails(fd, 'w')) return -1;
    off_t offset = of_interest(fd) ? lseek(fd, 0, SEEK_CUR) : 0;
    ssize_t done = REAL(writev)(fd, parts, count);
    if (of_interest(fd)) wrote(fd, parts, count, done, offset);
    return done;
}

#define SYNC(name)                                                                                            \
    int name(int fd) {                                                                                        \
        if (fails(fd, 's')) return -1;                                                                        \
        int result = REAL(name)(fd);                                                                          \
        if (result == 0 && of_interest(fd)) record('s', 0, NULL, 0, 0);                                       \
        return result;                                                                                        \
    }
SYNC(fsync)
SYNC(fdatasync)

#define TRUNCATE(name, type)                                                                                  \
    int name(int fd, type length) {                                                                           \
        int result = REAL(name)(fd, length);                                                                  \
        if (result == 0 && of_interest(fd)) record('t', length, NULL, 0, 0);                                  \
        return result;                                                                                        \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)
