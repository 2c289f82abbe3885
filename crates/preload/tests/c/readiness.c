/*
 * What poll, ppoll, select, epoll and io_uring report of a completion channel, of
 * asynchronous events, and of a channel of the connection manager. RXE_ADDR is an address of
 * the first device. The same program runs in guests, on devices of the kernel.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/utsname.h>

#include "check.h"
#include "loopback.h"

enum { SOON = 10000, QUIET = 50, EVENTS = 64 };

static const char *address;
static struct ibv_context *context;
static struct ibv_pd *pd;
static int fired, taken;

/* Completions: each event is of a queue of its own. */

static struct ibv_comp_channel *completions;
static struct ibv_cq *queue[EVENTS];

static void fire_completion(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, completions, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { 1, 1, 1, 1 } };
	struct ibv_qp_attr attr = { .timeout = 14, .retry_cnt = 7,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	struct ibv_send_wr *bad, wr = { .opcode = IBV_WR_RDMA_WRITE,
					.send_flags = IBV_SEND_SIGNALED };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_wc wc;

	CHECK(cq && qp && !ibv_req_notify_cq(cq, 0));
	connect_to_itself(qp, attr);
	CHECK(!ibv_post_send(qp, &wr, &bad));
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS && !ibv_destroy_qp(qp));
	queue[fired] = cq;
}

static int take_completion(void)
{
	struct ibv_cq *cq;
	void *ignored;

	if (ibv_get_cq_event(completions, &cq, &ignored))
		return -1;
	CHECK(cq == queue[taken]);
	ibv_ack_cq_events(cq, 1);
	CHECK(!ibv_destroy_cq(cq));
	return 0;
}

/* Asynchronous events: a queue pair with a shared receive queue takes no more receives. */

static struct ibv_srq *srq;
static struct ibv_cq *unused;
static struct ibv_qp *last[EVENTS];

static void fire_async(void)
{
	struct ibv_qp_init_attr init = { .send_cq = unused, .recv_cq = unused, .srq = srq,
					 .qp_type = IBV_QPT_RC, .cap = { 1, 0, 1, 0 } };
	struct ibv_qp_attr attr = { .timeout = 14, .retry_cnt = 7 };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	CHECK(qp);
	connect_to_itself(qp, attr);
	attr.qp_state = IBV_QPS_ERR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	last[fired] = qp;
}

static int take_async(void)
{
	struct ibv_async_event event;

	if (ibv_get_async_event(context, &event))
		return -1;
	CHECK(event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED);
	CHECK(event.element.qp == last[taken]);
	ibv_ack_async_event(&event);
	CHECK(!ibv_destroy_qp(event.element.qp));
	return 0;
}

/* The connection manager: addresses are resolved. */

static struct rdma_event_channel *manager;

static void fire_manager(void)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(7) };
	struct rdma_cm_id *id;

	CHECK(inet_pton(AF_INET, address, &to.sin_addr) == 1);
	CHECK(!rdma_create_id(manager, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, SOON));
}

static int take_manager(void)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	if (rdma_get_cm_event(manager, &event))
		return -1;
	CHECK(event->event == RDMA_CM_EVENT_ADDR_RESOLVED);
	id = event->id;
	CHECK(!rdma_ack_cm_event(event) && !rdma_destroy_id(id));
	return 0;
}

/* rdma_rxe does not report this event before Linux 6.5. */
static int reports_async(const char *device)
{
	struct utsname system;
	int major, minor;

	CHECK(!uname(&system) && sscanf(system.release, "%d.%d", &major, &minor) == 2);
	return strncmp(device, "rxe", 3) || major > 6 || (major == 6 && minor >= 5);
}

static void (*fire_one)(void);
static int (*take_one)(void);

static int polled(int fd, int patience)
{
	struct pollfd one = { .fd = fd, .events = POLLIN | POLLOUT | POLLPRI | POLLRDHUP };

	return poll(&one, 1, patience) ? one.revents : 0;
}

/* Each is reported by the time that this returns, as an event or by the first wait. */
static void fire(void)
{
	fire_one();
	fired++;
}

static void take(void)
{
	CHECK(!take_one());
	taken++;
}

static void polls(int fd)
{
	struct timespec none = { 0, 0 };
	struct pollfd one = { .fd = fd, .events = POLLIN | POLLOUT };

	CHECK(polled(fd, QUIET) == 0);
	fire();
	CHECK(polled(fd, SOON) == POLLIN);
	CHECK(ppoll(&one, 1, &none, NULL) == 1 && one.revents == POLLIN);
	fire();
	CHECK(polled(fd, SOON) == POLLIN);
	take();
	CHECK(polled(fd, SOON) == POLLIN);
	take();
	CHECK(polled(fd, QUIET) == 0 && ppoll(&one, 1, &none, NULL) == 0);
}

static int selected(int fd, int seconds)
{
	struct timeval patience = { seconds, 0 };
	fd_set in, out;

	FD_ZERO(&in);
	FD_ZERO(&out);
	FD_SET(fd, &in);
	FD_SET(fd, &out);
	CHECK(select(fd + 1, &in, &out, NULL, &patience) >= 0);
	return FD_ISSET(fd, &in) + 2 * FD_ISSET(fd, &out);
}

static void selects(int fd)
{
	CHECK(selected(fd, 0) == 0);
	fire();
	CHECK(selected(fd, SOON / 1000) == 1);
	take();
	CHECK(selected(fd, 0) == 0);
}

/* Returns the reported events. */
static int waited(int epoll, int patience)
{
	struct epoll_event event;

	return epoll_wait(epoll, &event, 1, patience) ? (int)event.events : 0;
}

static void level(int fd)
{
	struct epoll_event all = { .events = EPOLLIN | EPOLLOUT };
	int epoll = epoll_create1(0);

	CHECK(!epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &all) && !waited(epoll, QUIET));
	fire();
	CHECK(waited(epoll, SOON) == EPOLLIN && waited(epoll, 0) == EPOLLIN);
	take();
	CHECK(!waited(epoll, QUIET) && !close(epoll));
}

static void edge(int fd)
{
	struct epoll_event all = { .events = EPOLLIN | EPOLLOUT | EPOLLET };
	int epoll = epoll_create1(0);

	CHECK(!epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &all) && !waited(epoll, QUIET));
	for (int n = 0; n < 3; n++) {
		fire();
		CHECK(waited(epoll, SOON) == EPOLLIN);
		CHECK(!waited(epoll, QUIET));
	}
	take();
	CHECK(!waited(epoll, QUIET));
	fire();
	CHECK(waited(epoll, SOON) == EPOLLIN);
	for (int n = 0; n < 3; n++)
		take();
	CHECK(!waited(epoll, QUIET) && !close(epoll));
}

static void oneshot(int fd)
{
	struct epoll_event all = { .events = EPOLLIN | EPOLLOUT | EPOLLONESHOT };
	int epoll = epoll_create1(0);

	CHECK(!epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &all) && !waited(epoll, QUIET));
	fire();
	CHECK(waited(epoll, SOON) == EPOLLIN && !waited(epoll, QUIET));
	fire();
	CHECK(!waited(epoll, QUIET));
	CHECK(!epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &all) && waited(epoll, SOON) == EPOLLIN);
	take();
	take();
	CHECK(!epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &all) && !waited(epoll, QUIET));
	CHECK(!close(epoll));
}

/* An instance in an instance, as in an executor within another. */
static void nested(int fd)
{
	struct epoll_event all = { .events = EPOLLIN | EPOLLOUT | EPOLLET };
	struct epoll_event inner_all = { .events = EPOLLIN };
	int outer = epoll_create1(0), inner = epoll_create1(0);

	CHECK(!epoll_ctl(inner, EPOLL_CTL_ADD, fd, &inner_all));
	CHECK(!epoll_ctl(outer, EPOLL_CTL_ADD, inner, &all) && !waited(outer, QUIET));
	for (int n = 0; n < 2; n++) {
		fire();
		CHECK(waited(outer, SOON) == EPOLLIN && waited(inner, 0) == EPOLLIN);
	}
	take();
	take();
	CHECK(!waited(inner, QUIET) && !close(inner) && !close(outer));
}

static void nonblocking(int fd)
{
	int other = dup(fd);

	CHECK(other >= 0 && !(fcntl(fd, F_GETFL) & O_NONBLOCK));
	CHECK(!fcntl(other, F_SETFL, fcntl(other, F_GETFL) | O_NONBLOCK));
	CHECK(fcntl(fd, F_GETFL) & O_NONBLOCK);
	CHECK(take_one() == -1 && errno == EAGAIN);
	fire();
	CHECK(polled(other, SOON) == POLLIN);
	CHECK(!close(other));
	take();
	CHECK(take_one() == -1 && errno == EAGAIN);
	CHECK(!fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK));
	CHECK(!(fcntl(fd, F_GETFL) & O_NONBLOCK));
	fire();
	take();
}

/* A ring of io_uring, if the system allows one. */
struct ring {
	int fd;
	struct io_uring_params params;
	char *queues;
	struct io_uring_sqe *entries;
};

static unsigned *field(struct ring *ring, unsigned offset)
{
	return (unsigned *)(ring->queues + offset);
}

static int open_ring(struct ring *ring)
{
	struct io_uring_params *params = &ring->params;

	ring->fd = syscall(SYS_io_uring_setup, 8, params);
	if (ring->fd < 0 || !(params->features & IORING_FEAT_SINGLE_MMAP))
		return -1;
	ring->queues = mmap(NULL, params->cq_off.cqes + params->cq_entries *
			    sizeof(struct io_uring_cqe) + 4096, PROT_READ | PROT_WRITE,
			    MAP_SHARED, ring->fd, IORING_OFF_SQ_RING);
	ring->entries = mmap(NULL, params->sq_entries * sizeof(struct io_uring_sqe),
			     PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, IORING_OFF_SQES);
	CHECK(ring->queues != MAP_FAILED && ring->entries != MAP_FAILED);
	return 0;
}

/* Requests a poll of the descriptor; with `multi`, until it is closed. */
static void request(struct ring *ring, int fd, int multi)
{
	unsigned *tail = field(ring, ring->params.sq_off.tail);
	unsigned at = *tail & *field(ring, ring->params.sq_off.ring_mask);

	ring->entries[at] = (struct io_uring_sqe){
		.opcode = IORING_OP_POLL_ADD, .fd = fd, .poll32_events = POLLIN | POLLOUT,
		.len = multi ? IORING_POLL_ADD_MULTI : 0,
	};
	field(ring, ring->params.sq_off.array)[at] = at;
	__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
	CHECK(syscall(SYS_io_uring_enter, ring->fd, 1, 0, 0, NULL, 0) == 1);
}

/* Returns the result of the next completion; 0 if there is none. */
static int result(struct ring *ring, int patience)
{
	unsigned *head = field(ring, ring->params.cq_off.head);
	unsigned at = *head & *field(ring, ring->params.cq_off.ring_mask);
	struct io_uring_cqe *cqe = (void *)(ring->queues + ring->params.cq_off.cqes);
	struct pollfd one = { .fd = ring->fd, .events = POLLIN };

	if (poll(&one, 1, patience) == 0)
		return 0;
	CHECK(__atomic_load_n(field(ring, ring->params.cq_off.tail), __ATOMIC_ACQUIRE) != *head);
	__atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
	return cqe[at].res;
}

static void rings(int fd)
{
	struct ring ring = { 0 };

	if (open_ring(&ring))
		return;
	request(&ring, fd, 0);
	CHECK(!result(&ring, QUIET));
	fire();
	CHECK(result(&ring, SOON) == POLLIN);
	request(&ring, fd, 0);
	CHECK(result(&ring, SOON) == POLLIN);
	take();
	request(&ring, fd, 1);
	for (int n = 0; n < 3; n++) {
		CHECK(!result(&ring, QUIET));
		fire();
		CHECK(result(&ring, SOON) == POLLIN);
	}
	for (int n = 0; n < 3; n++)
		take();
	CHECK(!result(&ring, QUIET) && !close(ring.fd));
}

static void source(const char *name, int fd, void (*fires)(void), int (*takes)(void))
{
	static const struct {
		const char *name;
		void (*check)(int);
	} table[] = {
		{ "poll", polls }, { "select", selects }, { "level", level }, { "edge", edge },
		{ "oneshot", oneshot }, { "nested", nested }, { "O_NONBLOCK", nonblocking },
		{ "io_uring", rings },
	};

	fire_one = fires;
	take_one = takes;
	for (size_t n = 0; n < sizeof table / sizeof *table; n++) {
		fired = taken = 0;
		printf("%s: %s\n", name, table[n].name);
		fflush(stdout);
		table[n].check(fd);
	}
}

int main(void)
{
	struct ibv_srq_init_attr init = { .attr = { 1, 1, 0 } };
	struct ibv_device **list = ibv_get_device_list(NULL);

	address = getenv("RXE_ADDR");
	CHECK(address);
	context = ibv_open_device(list[0]);
	CHECK(context);
	pd = ibv_alloc_pd(context);
	completions = ibv_create_comp_channel(context);
	manager = rdma_create_event_channel();
	srq = ibv_create_srq(pd, &init);
	unused = ibv_create_cq(context, 4, NULL, NULL, 0);
	CHECK(pd && completions && manager && srq && unused);
	source("completions", completions->fd, fire_completion, take_completion);
	if (reports_async(ibv_get_device_name(list[0])))
		source("async", context->async_fd, fire_async, take_async);
	source("manager", manager->fd, fire_manager, take_manager);
	return 0;
}
