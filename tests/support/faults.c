/* Preloaded into a daemon: makes one call on one directory tree fail, or all of them from some call on.
 *
 * A test maps the same page of orders: the class Faults in test_faults.py knows its layout. Calls on anything outside the tree, and all
 * calls while the orders are off, go straight through.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, RECORD, ARMED, BROKEN };   /* BROKEN: the fault has come, and every later call meets it as well */
enum { INSTEAD, AFTER, SHORT };

struct orders {
    int mode, code, effect, lasting, countdown, nbytes, hits;
    char function[32];   /* empty: any call */
    char path[1024];     /* relative to the tree; a pattern */
};

static struct orders *orders;
static const char *root;
static size_t root_length;
static int record_fd = -1;

__attribute__((constructor)) static void begin(void)
{
    const char *page = getenv("FAULTS_PAGE"), *record = getenv("FAULTS_RECORD");
    root = getenv("FAULTS_ROOT");
    if (!page || !record || !root)
        return;
    root_length = strlen(root);
    int fd = syscall(SYS_openat, AT_FDCWD, page, O_RDWR | O_CLOEXEC);
    record_fd = syscall(SYS_openat, AT_FDCWD, record, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (fd < 0 || record_fd < 0)
        return;
    void *mapped = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (mapped != MAP_FAILED)
        orders = mapped;
}

/* The path of a call relative to the tree; NULL when it lies outside. */
static const char *inside(int fd, const char *path, char *room, size_t size)
{
    size_t length = 0;
    if (!path || path[0] != '/') {
        char link[64];
        if (fd == AT_FDCWD)
            snprintf(link, sizeof link, "/proc/self/cwd");
        else
            snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        long got = syscall(SYS_readlinkat, AT_FDCWD, link, room, size - 1);
        if (got <= 0)
            return NULL;
        length = got;
        room[length] = 0;
    } else {
        room[0] = 0;
    }
    if (path && path[0])
        snprintf(room + length, size - length, "%s%s", path[0] == '/' ? "" : "/", path);
    if (strncmp(room, root, root_length) || (room[root_length] && room[root_length] != '/'))
        return NULL;
    return room + root_length + (room[root_length] == '/');
}

/* Whether this call meets the fault. */
static int meets(const char *function, int fd, const char *path)
{
    char room[4096];
    int saved = errno, met = 0;
    if (!orders || orders->mode == OFF)
        return 0;
    const char *where = inside(fd, path, room, sizeof room);
    if (!where) {
        errno = saved;
        return 0;
    }
    if (orders->mode == RECORD) {
        char line[4200];
        int length = snprintf(line, sizeof line, "%s %s\n", function, where);
        if (syscall(SYS_write, record_fd, line, length) != length)
            abort();
    } else if (orders->mode == BROKEN) {
        met = 1;
    } else if ((!orders->function[0] ||
                (!strcmp(orders->function, function) && !fnmatch(orders->path, where, 0))) &&
               __atomic_sub_fetch(&orders->countdown, 1, __ATOMIC_SEQ_CST) == -1) {
        int armed = ARMED;   /* unless it is being withdrawn at this moment: that must not be undone */
        met = __atomic_compare_exchange_n(&orders->mode, &armed, orders->lasting ? BROKEN : OFF, 0, __ATOMIC_SEQ_CST,
                                          __ATOMIC_SEQ_CST);
    }
    if (met)
        __atomic_add_fetch(&orders->hits, 1, __ATOMIC_SEQ_CST);
    errno = saved;
    return met;
}

static int fault(void)
{
    errno = orders->code;
    return -1;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

/* A call that fails with -1; `what` is how it is called in the record. */
#define CALL(name, what, fd, path, parameters, arguments, ...) \
    int name parameters { \
        REAL(int, name, __VA_ARGS__); \
        if (!meets(what, fd, path)) return real arguments; \
        if (orders->effect == AFTER && real arguments < 0) return -1; \
        return fault(); \
    }

#define OPEN(name, fd, parameters, arguments, ...) \
    int name parameters { \
        REAL(int, name, __VA_ARGS__); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, int); va_end(rest); } \
        if (!meets(flags & O_CREAT ? "create" : "open", fd, path)) return real arguments; \
        if (orders->effect == AFTER) { int made = real arguments; if (made < 0) return -1; syscall(SYS_close, made); } \
        return fault(); \
    }

OPEN(open, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode), const char *, int, ...)
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode), const char *, int, ...)
OPEN(openat, fd, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), int, const char *, int, ...)
OPEN(openat64, fd, (int fd, const char *path, int flags, ...), (fd, path, flags, mode), int, const char *, int, ...)

CALL(mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
CALL(mkdirat, "mkdir", fd, path, (int fd, const char *path, mode_t mode), (fd, path, mode), int, const char *, mode_t)
CALL(linkat, "link", tofd, to, (int fd, const char *path, int tofd, const char *to, int flags),
     (fd, path, tofd, to, flags), int, const char *, int, const char *, int)
CALL(renameat, "rename", tofd, to, (int fd, const char *path, int tofd, const char *to), (fd, path, tofd, to),
     int, const char *, int, const char *)
CALL(renameat2, "rename", tofd, to, (int fd, const char *path, int tofd, const char *to, unsigned flags),
     (fd, path, tofd, to, flags), int, const char *, int, const char *, unsigned)
CALL(unlinkat, flags & AT_REMOVEDIR ? "rmdir" : "unlink", fd, path, (int fd, const char *path, int flags),
     (fd, path, flags), int, const char *, int)
CALL(fchmodat, "chmod", fd, path, (int fd, const char *path, mode_t mode, int flags), (fd, path, mode, flags),
     int, const char *, mode_t, int)
CALL(fchmod, "chmod", fd, NULL, (int fd, mode_t mode), (fd, mode), int, mode_t)
CALL(fstatat, "stat", fd, path, (int fd, const char *path, struct stat *facts, int flags), (fd, path, facts, flags),
     int, const char *, struct stat *, int)
CALL(fstatat64, "stat", fd, path, (int fd, const char *path, struct stat64 *facts, int flags),
     (fd, path, facts, flags), int, const char *, struct stat64 *, int)
CALL(stat, "stat", AT_FDCWD, path, (const char *path, struct stat *facts), (path, facts), const char *, struct stat *)
CALL(stat64, "stat", AT_FDCWD, path, (const char *path, struct stat64 *facts), (path, facts), const char *,
     struct stat64 *)
CALL(lstat, "stat", AT_FDCWD, path, (const char *path, struct stat *facts), (path, facts), const char *, struct stat *)
CALL(lstat64, "stat", AT_FDCWD, path, (const char *path, struct stat64 *facts), (path, facts), const char *,
     struct stat64 *)
CALL(fstat, "stat", fd, NULL, (int fd, struct stat *facts), (fd, facts), int, struct stat *)
CALL(fstat64, "stat", fd, NULL, (int fd, struct stat64 *facts), (fd, facts), int, struct stat64 *)
CALL(fstatvfs, "statvfs", fd, NULL, (int fd, struct statvfs *facts), (fd, facts), int, struct statvfs *)
CALL(fstatvfs64, "statvfs", fd, NULL, (int fd, struct statvfs64 *facts), (fd, facts), int, struct statvfs64 *)
CALL(fsync, "fsync", fd, NULL, (int fd), (fd), int)
CALL(fdatasync, "fsync", fd, NULL, (int fd), (fd), int)
CALL(ftruncate, "ftruncate", fd, NULL, (int fd, off_t nbytes), (fd, nbytes), int, off_t)
CALL(ftruncate64, "ftruncate", fd, NULL, (int fd, off64_t nbytes), (fd, nbytes), int, off64_t)
CALL(fallocate, "fallocate", fd, NULL, (int fd, int how, off_t from, off_t nbytes), (fd, how, from, nbytes), int, int,
     off_t, off_t)
CALL(flock, "flock", fd, NULL, (int fd, int how), (fd, how), int, int)

/* Close gives the descriptor back whatever it says. */
int close(int fd)
{
    int met = meets("close", fd, NULL);
    int done = syscall(SYS_close, fd);
    return met ? fault() : done;
}

/* Moving bytes: fewer than asked for is no error. */
#define MOVE(name, what, buffer, offset_type) \
    ssize_t name(int fd, buffer data, size_t nbytes, offset_type offset) { \
        REAL(ssize_t, name, int, buffer, size_t, offset_type); \
        if (!meets(what, fd, NULL)) return real(fd, data, nbytes, offset); \
        if (orders->effect == SHORT) { \
            size_t less = nbytes < (size_t)orders->nbytes ? nbytes : (size_t)orders->nbytes; \
            ssize_t done = less ? real(fd, data, less, offset) : 0; \
            return done < 0 && errno == EINVAL ? real(fd, data, less & ~(size_t)4095, offset) : done; \
        } \
        if (orders->effect == AFTER && real(fd, data, nbytes, offset) < 0) return -1; \
        return fault(); \
    }

MOVE(pwrite, "pwrite", const void *, off_t)
MOVE(pwrite64, "pwrite", const void *, off64_t)
MOVE(pread, "pread", void *, off_t)
MOVE(pread64, "pread", void *, off64_t)

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags)
{
    REAL(ssize_t, preadv64v2, int, const struct iovec *, int, off64_t, int);
    if (!meets("pread", fd, NULL))
        return real(fd, parts, count, offset, flags);
    if (orders->effect == SHORT && count == 1) {
        struct iovec less = {parts->iov_base, parts->iov_len < (size_t)orders->nbytes ? parts->iov_len : (size_t)orders->nbytes};
        return less.iov_len ? real(fd, &less, 1, offset, flags) : 0;
    }
    return fault();
}

ssize_t read(int fd, void *data, size_t nbytes)
{
    REAL(ssize_t, read, int, void *, size_t);
    if (!meets("read", fd, NULL))
        return real(fd, data, nbytes);
    if (orders->effect == SHORT)
        return real(fd, data, nbytes < (size_t)orders->nbytes ? nbytes : (size_t)orders->nbytes);
    return fault();
}

DIR *fdopendir(int fd)
{
    REAL(DIR *, fdopendir, int);
    if (!meets("opendir", fd, NULL))
        return real(fd);
    fault();
    return NULL;
}

struct dirent64 *readdir64(DIR *stream)
{
    REAL(struct dirent64 *, readdir64, DIR *);
    if (!meets("readdir", dirfd(stream), NULL))
        return real(stream);
    fault();
    return NULL;
}

int fcntl64(int fd, int command, ...)
{
    REAL(int, fcntl64, int, int, ...);
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (command != F_DUPFD_CLOEXEC || !meets("dup", fd, NULL))
        return real(fd, command, argument);
    return fault();
}
