/* SPDX-License-Identifier: MIT */
/*
 * Which ids of the connection manager may be bound to one port, and who may have a port below
 * 1024. Without common.h. RXE_ADDR is an IPv4 address of the device.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/capability.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"

#define PORT 7480

static struct rdma_event_channel *channel;
static const char *own;
static bool own_is_loopback;

static int option(struct rdma_cm_id *id, int name, int value)
{
	return rdma_set_option(id, RDMA_OPTION_ID, name, &value, sizeof value) ? errno : 0;
}

static int reuse(struct rdma_cm_id *id, int value)
{
	return option(id, RDMA_OPTION_ID_REUSEADDR, value);
}

static struct rdma_cm_id *new_id(void)
{
	struct rdma_cm_id *id;

	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	return id;
}

static struct rdma_cm_id *reusing(void)
{
	struct rdma_cm_id *id = new_id();

	CHECK(!reuse(id, 1));
	return id;
}

/* Returns 0 or the error. */
static int bound(struct rdma_cm_id *id, const char *address, int port)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(port) };
	struct sockaddr_in6 at6 = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	bool is_6 = strchr(address, ':');

	if (is_6)
		CHECK(inet_pton(AF_INET6, address, &at6.sin6_addr) == 1);
	else
		CHECK(inet_pton(AF_INET, address, &at.sin_addr) == 1);
	return rdma_bind_addr(id, is_6 ? (void *)&at6 : (void *)&at) ? errno : 0;
}

static int listening(struct rdma_cm_id *id)
{
	return rdma_listen(id, 2) ? errno : 0;
}

/* Loopback addresses are like that of all addresses. */
static int same_address(void)
{
	return own_is_loopback ? EADDRNOTAVAIL : EADDRINUSE;
}

static void destroy(struct rdma_cm_id *id)
{
	CHECK(!rdma_destroy_id(id));
}

/* A port of one address, and of all. */
static void exclusive(void)
{
	const struct {
		const char *one, *two;
		bool only;
		int error;
	} pairs[] = {
		{ own, own, false, same_address() },
		{ own, "0.0.0.0", false, EADDRNOTAVAIL },
		{ own, "127.0.0.1", false, EADDRNOTAVAIL },
		{ "0.0.0.0", "0.0.0.0", false, EADDRNOTAVAIL },
		{ "127.0.0.1", "127.0.0.2", false, EADDRNOTAVAIL },
		{ own, "::", false, EADDRNOTAVAIL },
		{ own, "::", true, 0 },
		{ "0.0.0.0", "::", false, EADDRNOTAVAIL },
		{ "0.0.0.0", "::", true, 0 },
	};

	for (size_t n = 0; n < 2 * sizeof pairs / sizeof *pairs; n++) {
		struct rdma_cm_id *one = new_id(), *two = new_id();
		const char *first = pairs[n / 2].one, *second = pairs[n / 2].two;
		int error;

		CHECK(!pairs[n / 2].only ||
		      (!option(one, RDMA_OPTION_ID_AFONLY, 1) &&
		       !option(two, RDMA_OPTION_ID_AFONLY, 1)));
		CHECK(!bound(one, n % 2 ? second : first, PORT));
		error = bound(two, n % 2 ? first : second, PORT);
		if (error != pairs[n / 2].error) {
			fprintf(stderr, "%s and %s: %s\n", first, second, strerror(error));
			_exit(1);
		}
		destroy(one);
		destroy(two);
	}
}

/* Ids that share a port until one listens. */
static void shared(const char *address, int error)
{
	struct rdma_cm_id *one = reusing(), *two = reusing(), *other = new_id(), *late;

	CHECK(!bound(one, address, PORT) && bound(other, address, PORT) == error);
	CHECK(!bound(two, address, PORT));
	CHECK(listening(one) == error && listening(two) == error);
	destroy(two);
	CHECK(!listening(one) && reuse(one, 1) == EINVAL);
	late = reusing();
	CHECK(bound(late, address, PORT) == error);
	destroy(one);
	CHECK(!bound(late, address, PORT) && !listening(late));
	destroy(late);

	/* The option of a bound id can be set, not cleared. */
	CHECK(!bound(other, address, PORT));
	one = reusing();
	CHECK(bound(one, address, PORT) == error);
	CHECK(!reuse(other, 1) && !bound(one, address, PORT) && reuse(other, 0) == EINVAL);
	destroy(other);
	destroy(one);
}

static void options(void)
{
	struct rdma_cm_id *id = new_id();

	CHECK(!reuse(id, 1) && !reuse(id, 0));
	CHECK(!bound(id, own, PORT) && !option(id, RDMA_OPTION_ID_AFONLY, 1));
	CHECK(!option(id, RDMA_OPTION_ID_AFONLY, 0) && reuse(id, 0) == EINVAL);
	CHECK(!listening(id) && option(id, RDMA_OPTION_ID_AFONLY, 1) == EINVAL);
	destroy(id);
}

/* Ports below 1024, for which a program needs a capability. */
static void privileged(int error)
{
	static const char *const addresses[] = { "0.0.0.0", "::", "127.0.0.1" };

	for (int n = 0; n < 4; n++) {
		const char *address = n < 3 ? addresses[n] : own;
		struct rdma_cm_id *id = new_id();

		CHECK(bound(id, address, 1023) == error);
		destroy(id);
		id = new_id();
		CHECK(!bound(id, address, 1024));
		destroy(id);
	}
}

int main(void)
{
	struct __user_cap_header_struct header = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct capabilities[2];

	own = getenv("RXE_ADDR");
	CHECK(own);
	own_is_loopback = !strncmp(own, "127.", 4);
	channel = rdma_create_event_channel();
	CHECK(channel);
	exclusive();
	options();
	shared("0.0.0.0", EADDRNOTAVAIL);
	shared("::", EADDRNOTAVAIL);
	shared(own, same_address());
	CHECK(!syscall(SYS_capget, &header, capabilities));
	if (capabilities[0].effective & 1 << CAP_NET_BIND_SERVICE) {
		privileged(0);
		capabilities[0].effective &= ~(1u << CAP_NET_BIND_SERVICE);
		CHECK(!syscall(SYS_capset, &header, capabilities));
		/* The kernel refuses files that were opened with other rights. */
		channel = rdma_create_event_channel();
		CHECK(channel);
	}
	privileged(EACCES);
	puts("well");
	return 0;
}
