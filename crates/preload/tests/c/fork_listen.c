/*
 * Servers that listen before they fork. `fork_listen MODE ADDRESS`: a server, as the mode says,
 * answers one message of each of its clients, which are children of the first process. Exit
 * status 0 if all was as it should be.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/wait.h>

#include "check.h"

static const char *address;
/* How often a client may be refused. */
static int max_refused = 1000;

static struct ibv_qp_init_attr attributes(void)
{
	return (struct ibv_qp_init_attr){
		.cap = { 4, 4, 1, 1 }, .qp_type = IBV_QPT_RC, .sq_sig_all = 1 };
}

static struct rdma_addrinfo *resolve(int flags)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = flags }, *found;

	CHECK(!rdma_getaddrinfo(address, "7472", &hints, &found));
	return found;
}

static void waits_for(pid_t pid)
{
	int status;

	CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
}

/* Connects once somebody listens, sends a message and waits for the answer. */
static void client(void)
{
	struct rdma_addrinfo *found = resolve(0);
	static char message[16], answer[16];
	struct ibv_mr *mr, *answers;
	struct rdma_cm_id *id;
	struct ibv_wc wc;

	for (int tries = 0;; tries++) {
		struct ibv_qp_init_attr init = attributes();

		CHECK(!rdma_create_ep(&id, found, NULL, &init));
		CHECK((answers = rdma_reg_msgs(id, answer, sizeof answer)));
		CHECK(!rdma_post_recv(id, NULL, answer, sizeof answer, answers));
		if (!rdma_connect(id, NULL))
			break;
		CHECK(errno == ECONNREFUSED && tries < max_refused);
		CHECK(!rdma_dereg_mr(answers));
		rdma_destroy_ep(id);
		usleep(10000);
	}
	CHECK((mr = rdma_reg_msgs(id, message, sizeof message)));
	sprintf(message, "%d", getpid());
	CHECK(!rdma_post_send(id, NULL, message, sizeof message, mr, 0));
	CHECK(rdma_get_send_comp(id, &wc) == 1 && !wc.status);
	CHECK(rdma_get_recv_comp(id, &wc) == 1 && !wc.status && !strcmp(message, answer));
	CHECK(!rdma_disconnect(id) && !rdma_dereg_mr(mr) && !rdma_dereg_mr(answers));
	rdma_destroy_ep(id);
	rdma_freeaddrinfo(found);
}

static struct rdma_event_channel *channel;
static struct rdma_cm_id *listening;

static void binds(void)
{
	struct rdma_addrinfo *found = resolve(RAI_PASSIVE);

	CHECK((channel = rdma_create_event_channel()));
	CHECK(!rdma_create_id(channel, &listening, &listening, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listening, found->ai_src_addr));
	rdma_freeaddrinfo(found);
}

static void listens(void)
{
	binds();
	CHECK(!rdma_listen(listening, 8));
}

/* Returns the id of the next event of this kind. Requests that come before it are kept. */
static struct rdma_cm_id *event(enum rdma_cm_event_type kind)
{
	static struct rdma_cm_id *requests[8];
	static int kept;

	if (kind == RDMA_CM_EVENT_CONNECT_REQUEST && kept)
		return requests[--kept];
	for (;;) {
		struct rdma_cm_event *event;
		struct rdma_cm_id *id;
		int found;

		CHECK(!rdma_get_cm_event(channel, &event));
		id = event->id;
		found = event->event;
		CHECK(found != RDMA_CM_EVENT_CONNECT_REQUEST || event->listen_id == listening);
		CHECK(!rdma_ack_cm_event(event));
		if (found == (int)kind)
			return id;
		CHECK(found == RDMA_CM_EVENT_CONNECT_REQUEST && kept < 8);
		requests[kept++] = id;
	}
}

/* Serves a client. */
static void serve(void)
{
	struct rdma_cm_id *id = event(RDMA_CM_EVENT_CONNECT_REQUEST);
	struct ibv_qp_init_attr init = attributes();
	static char message[16];
	struct ibv_mr *mr;
	struct ibv_wc wc;

	CHECK(id->context == &listening && !rdma_create_qp(id, NULL, &init));
	CHECK((mr = rdma_reg_msgs(id, message, sizeof message)));
	CHECK(!rdma_post_recv(id, NULL, message, sizeof message, mr));
	CHECK(!rdma_accept(id, NULL) && event(RDMA_CM_EVENT_ESTABLISHED) == id);
	CHECK(rdma_get_recv_comp(id, &wc) == 1 && !wc.status);
	CHECK(!rdma_post_send(id, NULL, message, sizeof message, mr, 0));
	CHECK(rdma_get_send_comp(id, &wc) == 1 && !wc.status);
	CHECK(event(RDMA_CM_EVENT_DISCONNECTED) == id);
	CHECK(!rdma_dereg_mr(mr));
	rdma_destroy_qp(id);
	CHECK(!rdma_destroy_id(id));
}

static void ends(void)
{
	CHECK(!rdma_destroy_id(listening));
	rdma_destroy_event_channel(channel);
}

/* What another process has used first. */
static void refused(void)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	CHECK(rdma_get_cm_event(channel, &event) && errno == EIO);
	CHECK(rdma_listen(listening, 8) && errno == EIO);
	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) && errno == EIO);
}

int main(int argc, char **argv)
{
	const char *mode = argc > 2 ? argv[1] : "";
	int clients = 2, done[2], used[2];
	pid_t pid, server, workers[3];
	struct rdma_cm_event *none;
	char byte;

	address = argv[2];
	CHECK(!pipe(done) && !pipe(used));
#define IS(name) (!strcmp(mode, name))
	if (!(server = fork())) {
		close(done[0]);
		if (IS("daemon")) {
			listens();
			CHECK(!daemon(1, 1));
		} else if (IS("bound")) {
			binds();
			CHECK(!daemon(1, 1));
			CHECK(!rdma_listen(listening, 8));
		} else if (IS("twice")) {
			/* By hand; the events are awaited by what the parent has made. */
			struct epoll_event ready = { .events = EPOLLIN };
			int epoll = epoll_create1(0);

			listens();
			CHECK(!epoll_ctl(epoll, EPOLL_CTL_ADD, channel->fd, &ready));
			CHECK(!fcntl(channel->fd, F_SETFL, O_NONBLOCK));
			if (fork())
				_exit(0);
			CHECK(setsid() > 0);
			if (fork())
				_exit(0);
			CHECK(epoll_wait(epoll, &ready, 1, 60000) == 1);
			CHECK(!fcntl(channel->fd, F_SETFL, 0));
		} else if (IS("poll")) {
			struct pollfd ready;

			listens();
			ready = (struct pollfd){ .fd = channel->fd, .events = POLLIN };
			if (fork())
				_exit(0);
			CHECK(poll(&ready, 1, 60000) == 1);
		} else if (IS("select")) {
			fd_set ready;

			listens();
			pid = getpid();
			if (fork()) {
				/* Its child waits by then. */
				usleep(100000);
				_exit(0);
			}
			FD_ZERO(&ready);
			FD_SET(channel->fd, &ready);
			CHECK(select(channel->fd + 1, &ready, NULL, NULL, NULL) == 1);
		} else if (IS("gap") || IS("unread")) {
			/* Clients connect while the parent has ended, and its child has not used
			 * anything; or before, but the parent reads nothing. */
			struct pollfd ready;

			listens();
			ready = (struct pollfd){ .fd = channel->fd, .events = POLLIN };
			pid = getpid();
			if (fork()) {
				if (IS("unread")) {
					CHECK(write(used[1], "uu", 2) == 2);
					CHECK(poll(&ready, 1, 60000) == 1);
				}
				_exit(0);
			}
			while (getppid() == pid)
				usleep(1000);
			if (IS("gap"))
				CHECK(write(used[1], "uu", 2) == 2);
			usleep(300000);
		} else if (IS("child") || IS("left")) {
			/* A child serves while its parent lives, which has closed its descriptor or not. */
			listens();
			if ((pid = fork())) {
				if (IS("left"))
					close(channel->fd);
				CHECK(read(used[0], &byte, 1) == 1);
				if (IS("child"))
					refused();
				waits_for(pid);
				_exit(0);
			}
			serve();
			CHECK(write(used[1], "u", 1) == 1);
			clients--;
		} else if (IS("closes")) {
			/* Closes what its parent has made, after a fork of its own. */
			struct ibv_context *context = ibv_open_device(ibv_get_device_list(NULL)[0]);

			CHECK(context && ibv_create_cq(context, 1, NULL, NULL, 0));
			if ((pid = fork())) {
				waits_for(pid);
				_exit(0);
			}
			listens();
			if (!(pid = fork()))
				_exit(0);
			waits_for(pid);
			CHECK(!close(context->cmd_fd));
		} else if (IS("parent")) {
			/* Its children come second; one runs another program. */
			listens();
			if (!(pid = fork())) {
				execlp("true", "true", NULL);
				_exit(1);
			}
			waits_for(pid);
			for (int n = 0; n < 2; n++) {
				if (!(pid = fork())) {
					CHECK(read(used[0], &byte, 1) == 1);
					refused();
					_exit(0);
				}
				serve();
				CHECK(write(used[1], "u", 1) == 1);
				waits_for(pid);
			}
			clients = 0;
		} else if (IS("workers")) {
			/* The first one serves. */
			int served = 0, status;

			listens();
			for (int n = 0; n < 3; n++)
				if (!(workers[n] = fork())) {
					if (rdma_get_cm_event(channel, &none)) {
						CHECK(errno == EIO);
						_exit(0);
					}
					/* Left to its peer, which then has another try. */
					CHECK(!rdma_reject(none->id, NULL, 0));
					CHECK(!rdma_ack_cm_event(none));
					serve();
					serve();
					ends();
					_exit(3);
				}
			for (int n = 0; n < 3; n++) {
				CHECK(wait(&status) > 0 && WIFEXITED(status));
				CHECK(!WEXITSTATUS(status) || WEXITSTATUS(status) == 3);
				served += WEXITSTATUS(status) == 3;
			}
			CHECK(served == 1);
			CHECK(write(done[1], "w", 1) == 1);
			_exit(0);
		} else {
			return 2;
		}
		while (clients-- > 0)
			serve();
		ends();
		CHECK(write(done[1], "w", 1) == 1);
		_exit(0);
	}
	for (int n = 0; n < 2; n++)
		if (!(workers[n] = fork())) {
			if (IS("gap") || IS("unread")) {
				CHECK(read(used[0], &byte, 1) == 1);
				max_refused = 0;
			}
			client();
			_exit(0);
		}
	close(done[1]);
	CHECK(read(done[0], &byte, 1) == 1);
	waits_for(server);
	for (int n = 0; n < 2; n++)
		waits_for(workers[n]);
	/* The port is free. */
	listens();
	ends();
	return 0;
}
