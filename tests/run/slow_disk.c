/* A disk that takes SYNC_MS milliseconds until a file is on it. Preload it: LD_PRELOAD=slow_disk.so. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static int slow(long call, int file) {
    usleep(1000 * atoi(getenv("SYNC_MS")));
    return syscall(call, file);
}

int fsync(int file) { return slow(SYS_fsync, file); }

int fdatasync(int file) { return slow(SYS_fdatasync, file); }
