/*
 * A library with sockets of its own, as librspreload has them (built with -DLIBRARY), and a
 * program that waits for them while it has a device: calls by these names reach the library,
 * whichever is preloaded first.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

/* A descriptor that the kernel does not know. */
#define OWN 1000000

#ifdef LIBRARY
#include <dlfcn.h>

#define NEXT(name, ...)                                                                \
	((__typeof__(&name))dlsym(RTLD_NEXT, #name))(__VA_ARGS__)

int epoll_wait(int fd, struct epoll_event *events, int max, int timeout)
{
	return fd == OWN ? 5 : NEXT(epoll_wait, fd, events, max, timeout);
}

int poll(struct pollfd *fds, nfds_t count, int timeout)
{
	return count == 1 && fds->fd == OWN ? 6 : NEXT(poll, fds, count, timeout);
}

ssize_t recv(int fd, void *buffer, size_t length, int flags)
{
	return fd == OWN ? 7 : NEXT(recv, fd, buffer, length, flags);
}
#else
#include <infiniband/verbs.h>

#include "check.h"

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;
	struct epoll_event event;
	struct pollfd entry = { .fd = OWN, .events = POLLIN };
	char byte;

	CHECK(list && list[0]);
	context = ibv_open_device(list[0]);
	CHECK(context);
	CHECK(epoll_wait(OWN, &event, 1, 1000) == 5);
	CHECK(epoll_wait(OWN, &event, 1, 0) == 5);
	CHECK(poll(&entry, 1, 1000) == 6);
	CHECK(poll(&entry, 1, 0) == 6);
	CHECK(recv(OWN, &byte, 1, 0) == 7);
	CHECK(!ibv_close_device(context));
	return 0;
}
#endif
