/* A context whose polls drive the devices: an empty one calls the preload library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdlib.h>

#include "check.h"

struct functions {
	struct ibv_device **(*list)(int *);
	struct ibv_context *(*open)(struct ibv_device *);
	int (*close)(struct ibv_context *);
	struct ibv_cq *(*create)(struct ibv_context *, int, void *, struct ibv_comp_channel *, int);
	int (*destroy)(struct ibv_cq *);
};

static int is_hook(void *function)
{
	Dl_info of;

	return dladdr(function, &of) && strstr(of.dli_fname, "libringverbs_preload");
}

static void check_hooks(const struct functions *verbs)
{
	struct ibv_cq_init_attr_ex ask = { .cqe = 8 };
	struct ibv_poll_cq_attr poll = { 0 };
	struct ibv_device **devices;
	struct ibv_context *context;
	struct ibv_cq_ex *extended;
	struct ibv_cq *queue;
	struct ibv_wc found;
	int count = 0;

	devices = verbs->list(&count);
	CHECK(devices && count == 1);
	context = verbs->open(devices[0]);
	CHECK(context);
	CHECK(!is_hook(context->ops.poll_cq));
	/* More than once: the table stays as it is. */
	for (int n = 0; n < 3; n++) {
		queue = verbs->create(context, 8, NULL, NULL, 0);
		CHECK(queue && queue->context == context);
		CHECK(is_hook(context->ops.poll_cq) && is_hook(context->ops.req_notify_cq));
		CHECK(ibv_poll_cq(queue, 1, &found) == 0 && !ibv_req_notify_cq(queue, 1));
		extended = ibv_create_cq_ex(context, &ask);
		CHECK(extended && is_hook(extended->start_poll) && !is_hook(extended->next_poll));
		CHECK(ibv_start_poll(extended, &poll) == ENOENT);
		CHECK(!verbs->destroy(ibv_cq_ex_to_cq(extended)) && !verbs->destroy(queue));
	}
	CHECK(!verbs->close(context));
}
