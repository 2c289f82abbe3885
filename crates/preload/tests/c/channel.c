/*
 * Connections without queue pairs: `channel MODE` serves 100 of them, which
 * `channel client` makes and ends. Modes: poll, whose channel must have an event
 * whenever it is readable; edge, by EPOLLET; block.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <sys/epoll.h>

#include "check.h"

enum { COUNT = 100, PATIENCE = 60000, QUIET = 300 };

static struct rdma_event_channel *channel;
static struct rdma_conn_param param = { .qp_num = 1, .private_data = "?",
					.private_data_len = 1 };
/* Those that have ended. They stay, so that their clients' ends are noticed. */
static struct rdma_cm_id *ended[COUNT];
static int count;

/* Handles the next event. Returns its type, or -1 if there is none. */
static int handle(void)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	int type;

	if (rdma_get_cm_event(channel, &event)) {
		CHECK(errno == EAGAIN);
		return -1;
	}
	type = event->event;
	id = event->id;
	CHECK(!rdma_ack_cm_event(event));
	if (type == RDMA_CM_EVENT_CONNECT_REQUEST)
		CHECK(!rdma_accept(id, &param));
	if (type == RDMA_CM_EVENT_DISCONNECTED)
		ended[count++] = id;
	return type;
}

static void expect(int type)
{
	CHECK(handle() == type);
}

static void client(struct sockaddr *to)
{
	for (int n = 0; n < COUNT; n++) {
		struct rdma_cm_id *id;

		CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
		CHECK(!rdma_resolve_addr(id, NULL, to, PATIENCE));
		expect(RDMA_CM_EVENT_ADDR_RESOLVED);
		CHECK(!rdma_resolve_route(id, PATIENCE));
		expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
		CHECK(!rdma_connect(id, &param));
		expect(RDMA_CM_EVENT_CONNECT_RESPONSE);
		CHECK(!rdma_establish(id));
		CHECK(!rdma_disconnect(id));
		/* Without a look at what the server answers. */
		CHECK(!rdma_destroy_id(id));
	}
}

static void serve(const char *mode)
{
	struct pollfd one = { .fd = channel->fd, .events = POLLIN | POLLOUT };
	struct epoll_event edge = { .events = EPOLLIN | EPOLLOUT | EPOLLET };
	int epoll = epoll_create1(0);

	CHECK(!epoll_ctl(epoll, EPOLL_CTL_ADD, channel->fd, &edge));
	if (strcmp(mode, "block"))
		CHECK(!fcntl(channel->fd, F_SETFL, O_NONBLOCK));
	while (count < COUNT) {
		if (!strcmp(mode, "poll")) {
			CHECK(poll(&one, 1, PATIENCE) == 1 && one.revents == POLLIN);
			CHECK(handle() >= 0);
		} else if (!strcmp(mode, "edge")) {
			CHECK(epoll_wait(epoll, &edge, 1, PATIENCE) == 1);
			CHECK(edge.events == EPOLLIN);
			while (handle() >= 0)
				;
		} else {
			CHECK(handle() >= 0);
		}
	}
	CHECK(poll(&one, 1, QUIET) == 0);
	while (count)
		CHECK(!rdma_destroy_id(ended[--count]));
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(7471) };
	struct rdma_cm_id *listener;

	CHECK(argc == 2);
	at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	channel = rdma_create_event_channel();
	CHECK(channel);
	if (!strcmp(argv[1], "client")) {
		client((struct sockaddr *)&at);
		return 0;
	}
	CHECK(!rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&at));
	CHECK(!rdma_listen(listener, 10));
	serve(argv[1]);
	CHECK(!rdma_destroy_id(listener));
	return 0;
}
