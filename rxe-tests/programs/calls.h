/* SPDX-License-Identifier: MIT */
/*
 * Interposes write, ioctl and mmap for all libraries of this process (the programs
 * export their symbols), to count system calls and to make mappings fail. To be
 * included in one file of a program.
 */
#ifndef RXE_TESTS_CALLS_H
#define RXE_TESTS_CALLS_H

#include "common.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

/* Number of write and ioctl calls of this thread. */
static __thread unsigned syscalls;
/* Number of shared mappings until one fails with ENOMEM; 0: none fails. */
static unsigned mmap_fail;
/* Number of shared mappings so far. */
static unsigned mmap_shared;
/* Called with each new shared mapping, whose content it may change. */
static void (*mmap_hook)(void *addr, size_t len);

ssize_t write(int fd, const void *buf, size_t n)
{
	syscalls++;
	return syscall(SYS_write, fd, buf, n);
}

int ioctl(int fd, unsigned long request, ...)
{
	va_list ap;
	void *arg;

	va_start(ap, request);
	arg = va_arg(ap, void *);
	va_end(ap);
	syscalls++;
	return syscall(SYS_ioctl, fd, request, arg);
}

static void *map(void *addr, size_t len, int prot, int flags, int fd, off_t off)
{
	void *at;

	if (fd >= 0 && (flags & MAP_SHARED)) {
		mmap_shared++;
		if (mmap_fail && --mmap_fail == 0) {
			errno = ENOMEM;
			return MAP_FAILED;
		}
	}
	at = (void *)syscall(SYS_mmap, addr, len, prot, flags, fd, off);
	if (mmap_hook && at != MAP_FAILED && fd >= 0 && (flags & MAP_SHARED))
		mmap_hook(at, len);
	return at;
}

void *mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off)
{
	return map(addr, len, prot, flags, fd, off);
}

void *mmap64(void *addr, size_t len, int prot, int flags, int fd, off_t off)
{
	return map(addr, len, prot, flags, fd, off);
}

#endif
