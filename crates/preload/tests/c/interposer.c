/*
 * A library that counts the calls that the preloaded library makes through it, other than
 * those that the program's first thread passes on. At the end it prints them, in the file that
 * INTERPOSER names.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX = 64 };

static const char *names[MAX];
static int counts[MAX];

/* `passed_on` if the program may call the function, too. */
static void count(const char *name, int passed_on, void *caller)
{
	Dl_info from;
	int n;

	if (!dladdr(caller, &from) || !strstr(from.dli_fname, "libringverbs_preload"))
		return;
	if (passed_on && getpid() == gettid() && !getenv("INTERPOSER_FIRST"))
		return;
	for (n = 0; n < MAX - 1 && names[n] && strcmp(names[n], name); n++)
		;
	names[n] = name;
	__atomic_fetch_add(&counts[n], 1, __ATOMIC_RELAXED);
}

__attribute__((destructor)) static void print(void)
{
	const char *path = getenv("INTERPOSER");
	FILE *out = path ? fopen(path, "a") : NULL;

	if (!out)
		return;
	fprintf(out, "counted\n");
	for (int n = 0; n < MAX && names[n]; n++)
		fprintf(out, "%s: %d\n", names[n], counts[n]);
	fclose(out);
}

typedef long (*function)(long, long, long, long, long, long);

#define HOOK(name, passed_on)                                                          \
	long name(long a, long b, long c, long d, long e, long f)                      \
	{                                                                              \
		static function next;                                                  \
                                                                                       \
		if (!next)                                                             \
			next = (function)dlsym(RTLD_NEXT, #name);                      \
		count(#name, passed_on, __builtin_return_address(0));                  \
		return next(a, b, c, d, e, f);                                         \
	}

int getpid(void), gettid(void);

HOOK(epoll_create1, 0) HOOK(epoll_ctl, 0) HOOK(epoll_wait, 1) HOOK(eventfd, 0)
HOOK(memfd_create, 0) HOOK(timerfd_create, 0) HOOK(timerfd_settime, 0) HOOK(pipe2, 0)
HOOK(socket, 1) HOOK(socketpair, 0) HOOK(bind, 0) HOOK(connect, 0) HOOK(listen, 0)
HOOK(accept4, 0) HOOK(setsockopt, 0) HOOK(getsockopt, 0) HOOK(getsockname, 0)
HOOK(sendmmsg, 0) HOOK(recvmmsg, 0) HOOK(sendmsg, 1) HOOK(recvmsg, 1) HOOK(sendto, 1)
HOOK(recvfrom, 1) HOOK(recv, 1) HOOK(send, 1) HOOK(poll, 1) HOOK(ppoll, 1) HOOK(read, 1)
HOOK(write, 1) HOOK(close, 1) HOOK(open, 1) HOOK(open64, 1) HOOK(openat, 1) HOOK(fcntl, 1)
HOOK(ioctl, 1) HOOK(mmap, 1) HOOK(flock, 0) HOOK(ftruncate, 0) HOOK(unlink, 0)
HOOK(syscall, 1)
