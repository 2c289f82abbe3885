/* RDMA netlink of two embedded devices, mlx5_0 (RoCE) and mlx5_1 (InfiniBand), without a
 * library. */
#include <linux/netlink.h>
#include <rdma/rdma_netlink.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "check.h"

#define TYPE(command) RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_##command)

static const struct sockaddr_nl kernel = { .nl_family = AF_NETLINK };

struct request {
	struct nlmsghdr header;
	struct nlattr attribute;
	uint32_t value;
};

/* A request with an integer. */
static struct request request(int type, int flags, int attribute, uint32_t value)
{
	return (struct request){
		{ sizeof(struct request), type, NLM_F_REQUEST | flags, 7, 0 },
		{ 8, attribute },
		value,
	};
}

static int new_socket(void)
{
	int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_RDMA);

	CHECK(fd >= 0);
	return fd;
}

static void ask(int fd, struct request request)
{
	CHECK(sendto(fd, &request, sizeof request, 0, (void *)&kernel, sizeof kernel) ==
	      sizeof request);
}

static _Alignas(8) char answer[8192];

/* Receives a datagram of the kernel, and returns its first message. */
static struct nlmsghdr *receive(int fd, int flags)
{
	struct sockaddr_nl from = { .nl_pid = 1 };
	socklen_t length = sizeof from;
	ssize_t received = recvfrom(fd, answer, sizeof answer, flags, (void *)&from, &length);
	struct nlmsghdr *header = (void *)answer;

	if (received < 0)
		return NULL;
	CHECK(length == sizeof from && from.nl_family == AF_NETLINK && from.nl_pid == 0);
	CHECK(header->nlmsg_len == received);
	return header;
}

/* Returns the attribute of a message, which must have it. */
static void *attribute(struct nlmsghdr *header, int kind)
{
	char *at = (char *)(header + 1);
	char *end = (char *)header + header->nlmsg_len;

	while (at < end) {
		struct nlattr *attribute = (void *)at;

		if (attribute->nla_type == kind)
			return attribute + 1;
		at += (attribute->nla_len + 3) & ~3;
	}
	CHECK(!"attribute");
	return NULL;
}

/* The error of the next answer. */
static int error(int fd)
{
	struct nlmsghdr *header = receive(fd, MSG_DONTWAIT);

	CHECK(header && header->nlmsg_type == NLMSG_ERROR && header->nlmsg_seq == 7);
	return -*(int *)(header + 1);
}

static void lists_devices(int fd, int flags)
{
	ask(fd, request(TYPE(GET), NLM_F_DUMP, RDMA_NLDEV_ATTR_DEV_INDEX, 0));
	for (int number = 0; number < 2; number++) {
		char name[] = { 'm', 'l', 'x', '5', '_', '0' + number, 0 };
		struct nlmsghdr *header = receive(fd, flags);

		if (flags & MSG_PEEK)
			CHECK(receive(fd, 0) == header);
		CHECK(header->nlmsg_type == TYPE(GET) && header->nlmsg_flags == NLM_F_MULTI);
		CHECK(!strcmp(attribute(header, RDMA_NLDEV_ATTR_DEV_NAME), name));
		CHECK(!strcmp(attribute(header, RDMA_NLDEV_ATTR_DEV_PROTOCOL),
			      number ? "ib" : "roce"));
	}
	CHECK(receive(fd, 0)->nlmsg_type == NLMSG_DONE);
}

static void refuses(int fd)
{
	struct sockaddr_nl other = { .nl_family = AF_NETLINK, .nl_pid = 1 };
	struct request bad = request(TYPE(GET), 0, RDMA_NLDEV_ATTR_DEV_INDEX, 0);

	ask(fd, request(TYPE(GET), 0, RDMA_NLDEV_ATTR_DEV_INDEX, 2));
	CHECK(error(fd) == ENODEV);
	ask(fd, request(TYPE(PORT_GET), 0, RDMA_NLDEV_ATTR_PORT_INDEX, 1));
	CHECK(error(fd) == EINVAL);
	ask(fd, request(TYPE(SET), NLM_F_DUMP, RDMA_NLDEV_ATTR_DEV_INDEX, 0));
	CHECK(error(fd) == EOPNOTSUPP);
	bad.attribute.nla_len = 9;
	ask(fd, bad);
	CHECK(error(fd) == EINVAL);
	bad.header.nlmsg_len = sizeof bad + 1;
	ask(fd, bad);
	CHECK(sendto(fd, &bad, 3, 0, NULL, 0) == 3);
	CHECK(!receive(fd, MSG_DONTWAIT) && errno == EAGAIN);
	CHECK(sendto(fd, &bad, sizeof bad, 0, (void *)&other, sizeof other) < 0 && errno == EPERM);
	CHECK(sendto(fd, &bad, sizeof bad, 0, (void *)&other, 4) < 0 && errno == EINVAL);
}

/* Another program sends what looks like an answer. */
static void forges(int fd)
{
	struct request forged = request(TYPE(GET), 0, RDMA_NLDEV_ATTR_DEV_INDEX, 9);
	int other = socket(AF_NETLINK, SOCK_RAW, NETLINK_USERSOCK);
	struct sockaddr_nl to;
	socklen_t length = sizeof to;

	CHECK(!getsockname(fd, (void *)&to, &length) && to.nl_pid != 0);
	CHECK(sendto(other, &forged, sizeof forged, 0, (void *)&to, sizeof to) == sizeof forged);
	CHECK(!close(other));
}

int main(void)
{
	int fd = new_socket(), copy, ends[2], status;
	struct request one = request(TYPE(GET), NLM_F_ACK, RDMA_NLDEV_ATTR_DEV_INDEX, 1);
	struct iovec parts[] = { { &one, 10 }, { NULL, 0 }, { (char *)&one + 10, sizeof one - 10 } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = 3 };
	char byte = 1;
	pid_t child;

	CHECK(!bind(fd, (void *)&kernel, sizeof kernel));
	lists_devices(fd, 0);
	lists_devices(fd, MSG_PEEK);
	refuses(fd);
	forges(fd);
	lists_devices(fd, 0);
	forges(fd);
	lists_devices(fd, MSG_PEEK);
	forges(fd);
	CHECK(!receive(fd, MSG_DONTWAIT) && errno == EAGAIN);

	/* All ways of sending; this socket is not bound. */
	copy = new_socket();
	CHECK(dup2(copy, fd) == fd && !close(copy));
	for (int way = 0; way < 3; way++) {
		ssize_t sent = way == 0	  ? write(fd, &one, sizeof one)
			       : way == 1 ? send(fd, &one, sizeof one, 0)
					  : sendmsg(fd, &message, 0);
		CHECK(sent == sizeof one);
		CHECK(!strcmp(attribute(receive(fd, 0), RDMA_NLDEV_ATTR_DEV_NAME), "mlx5_1"));
		CHECK(error(fd) == 0);
	}

	ask(fd, request(TYPE(SYS_GET), 0, RDMA_NLDEV_ATTR_DEV_INDEX, 0));
	CHECK(*(char *)attribute(receive(fd, 0), RDMA_NLDEV_SYS_ATTR_COPY_ON_FORK) == 1);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		lists_devices(fd, 0);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);

	/* The number becomes another socket. */
	CHECK(!close(fd) && !socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends));
	CHECK(ends[0] == fd && send(ends[0], &byte, 1, 0) == 1);
	CHECK(recv(ends[1], &byte, 1, 0) == 1 && byte == 1);
	puts("well");
	return 0;
}
