/* SPDX-License-Identifier: MIT */
/*
 * Prints every public field of every object after its creation, and the results of
 * all queries, as text that is the same in each run: pointers and numbers that the
 * kernel assigns are printed as the value that they equal. The output must be the
 * same with every provider.
 * usage: fields
 */
#include "common.h"

#define NUM(obj, f) printf("  " #f " %lld\n", (long long)(obj)->f)
#define SET(obj, f) printf("  " #f " %s\n", (obj)->f ? "set" : "0")
#define IS(obj, f, other)                                                      \
	printf("  " #f " %s\n",                                                \
	       (const void *)(uintptr_t)(obj)->f ==                            \
			       (const void *)(uintptr_t)(other) ?              \
		       #other :                                                \
		       "other")

static void print_result(const char *what, int rc)
{
	printf("%s: %d\n", what, rc);
}

/* Prints the result of a create call that should be refused. */
#define PRINT_REFUSAL(call)                                                    \
	do {                                                                   \
		errno = 0;                                                     \
		const void *it_ = (call);                                      \
		printf("%s: %s errno %d\n", #call, it_ ? "created" : "NULL",   \
		       it_ ? 0 : errno);                                       \
	} while (0)

static void dump_bytes(const char *name, const void *p, size_t n)
{
	const uint8_t *b = p;
	size_t i;

	printf("  %s", name);
	for (i = 0; i < n; i++)
		printf("%s%02x", i % 8 ? "" : " ", b[i]);
	putchar('\n');
}

static void device_attr(const struct ibv_device_attr *a)
{
	printf("  fw_ver \"%s\"\n", a->fw_ver);
	printf("  node_guid %016llx sys_image_guid %016llx\n",
	       (unsigned long long)be64toh(a->node_guid),
	       (unsigned long long)be64toh(a->sys_image_guid));
	NUM(a, max_mr_size);
	NUM(a, page_size_cap);
	NUM(a, vendor_id);
	NUM(a, vendor_part_id);
	NUM(a, hw_ver);
	NUM(a, max_qp);
	NUM(a, max_qp_wr);
	NUM(a, device_cap_flags);
	NUM(a, max_sge);
	NUM(a, max_sge_rd);
	NUM(a, max_cq);
	NUM(a, max_cqe);
	NUM(a, max_mr);
	NUM(a, max_pd);
	NUM(a, max_qp_rd_atom);
	NUM(a, max_ee_rd_atom);
	NUM(a, max_res_rd_atom);
	NUM(a, max_qp_init_rd_atom);
	NUM(a, max_ee_init_rd_atom);
	NUM(a, atomic_cap);
	NUM(a, max_ee);
	NUM(a, max_rdd);
	NUM(a, max_mw);
	NUM(a, max_raw_ipv6_qp);
	NUM(a, max_raw_ethy_qp);
	NUM(a, max_mcast_grp);
	NUM(a, max_mcast_qp_attach);
	NUM(a, max_total_mcast_qp_attach);
	NUM(a, max_ah);
	NUM(a, max_fmr);
	NUM(a, max_map_per_fmr);
	NUM(a, max_srq);
	NUM(a, max_srq_wr);
	NUM(a, max_srq_sge);
	NUM(a, max_pkeys);
	NUM(a, local_ca_ack_delay);
	NUM(a, phys_port_cnt);
}

static void device(struct ibv_context *ctx)
{
	struct ibv_device_attr a;
	struct ibv_device_attr_ex x;
	struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
	struct ibv_device *d = ctx->device;

	printf("device\n");
	NUM(d, node_type);
	NUM(d, transport_type);
	printf("  name %s dev_name %s\n", d->name, d->dev_name);
	printf("  dev_path %s ibdev_path %s\n", d->dev_path, d->ibdev_path);
	printf("  guid %016llx\n",
	       (unsigned long long)be64toh(ibv_get_device_guid(d)));
	printf("context\n");
	IS(ctx, device, d);
	NUM(ctx, num_comp_vectors);
	printf("  cmd_fd %d async_fd %d extended %d\n", ctx->cmd_fd >= 0,
	       ctx->async_fd >= 0, (uintptr_t)ctx->abi_compat == UINTPTR_MAX);
	printf("  poll_cq %d req_notify_cq %d post_srq_recv %d post_send %d post_recv %d\n",
	       !!ctx->ops.poll_cq, !!ctx->ops.req_notify_cq,
	       !!ctx->ops.post_srq_recv, !!ctx->ops.post_send,
	       !!ctx->ops.post_recv);

	memset(&a, 0xa5, sizeof(a));
	print_result("ibv_query_device", ibv_query_device(ctx, &a));
	device_attr(&a);
	memset(&x, 0xa5, sizeof(x));
	print_result("ibv_query_device_ex", ibv_query_device_ex(ctx, NULL, &x));
	device_attr(&x.orig_attr);
	NUM(&x, comp_mask);
	NUM(&x, odp_caps.general_caps);
	NUM(&x, odp_caps.per_transport_caps.rc_odp_caps);
	NUM(&x, odp_caps.per_transport_caps.uc_odp_caps);
	NUM(&x, odp_caps.per_transport_caps.ud_odp_caps);
	NUM(&x, completion_timestamp_mask);
	NUM(&x, hca_core_clock);
	NUM(&x, device_cap_flags_ex);
	NUM(&x, tso_caps.max_tso);
	NUM(&x, tso_caps.supported_qpts);
	NUM(&x, rss_caps.supported_qpts);
	NUM(&x, rss_caps.max_rwq_indirection_tables);
	NUM(&x, rss_caps.max_rwq_indirection_table_size);
	NUM(&x, rss_caps.rx_hash_fields_mask);
	NUM(&x, rss_caps.rx_hash_function);
	NUM(&x, max_wq_type_rq);
	NUM(&x, packet_pacing_caps.qp_rate_limit_min);
	NUM(&x, packet_pacing_caps.qp_rate_limit_max);
	NUM(&x, packet_pacing_caps.supported_qpts);
	NUM(&x, raw_packet_caps);
	NUM(&x, tm_caps.max_rndv_hdr_size);
	NUM(&x, tm_caps.max_num_tags);
	NUM(&x, tm_caps.flags);
	NUM(&x, tm_caps.max_ops);
	NUM(&x, tm_caps.max_sge);
	NUM(&x, cq_mod_caps.max_cq_count);
	NUM(&x, cq_mod_caps.max_cq_period);
	NUM(&x, max_dm_size);
	NUM(&x, pci_atomic_caps.fetch_add);
	NUM(&x, pci_atomic_caps.swap);
	NUM(&x, pci_atomic_caps.compare_swap);
	NUM(&x, xrc_odp_caps);
	NUM(&x, phys_port_cnt_ex);
	print_result("ibv_query_rt_values_ex", ibv_query_rt_values_ex(ctx, &values));
}

static void port(struct ibv_context *ctx)
{
	struct ibv_port_attr a;
	struct ibv_gid_entry entry, table[16];
	union ibv_gid gid, zero = {};
	ssize_t n;
	__be16 pkey;
	int i, rc;

	memset(&a, 0, sizeof(a));
	print_result("ibv_query_port 1", ibv_query_port(ctx, 1, &a));
	NUM(&a, state);
	NUM(&a, max_mtu);
	NUM(&a, active_mtu);
	NUM(&a, gid_tbl_len);
	NUM(&a, port_cap_flags);
	NUM(&a, max_msg_sz);
	NUM(&a, bad_pkey_cntr);
	NUM(&a, qkey_viol_cntr);
	NUM(&a, pkey_tbl_len);
	NUM(&a, lid);
	NUM(&a, sm_lid);
	NUM(&a, lmc);
	NUM(&a, max_vl_num);
	NUM(&a, sm_sl);
	NUM(&a, subnet_timeout);
	NUM(&a, init_type_reply);
	NUM(&a, active_width);
	NUM(&a, active_speed);
	NUM(&a, phys_state);
	NUM(&a, link_layer);
	NUM(&a, flags);
	NUM(&a, port_cap_flags2);
#ifdef HAVE_ACTIVE_SPEED_EX
	NUM(&a, active_speed_ex);
#endif
	print_result("ibv_query_port 0", ibv_query_port(ctx, 0, &a));
	print_result("ibv_query_port 2", ibv_query_port(ctx, 2, &a));
	for (i = 0; i < 16; i++) {
		memset(&gid, 0, sizeof(gid));
		rc = ibv_query_gid(ctx, 1, i, &gid);
		if (rc || !memcmp(&gid, &zero, sizeof(gid)))
			continue;
		printf("gid %d\n", i);
		dump_bytes("raw", gid.raw, 16);
		memset(&entry, 0, sizeof(entry));
		print_result("ibv_query_gid_ex", ibv_query_gid_ex(ctx, 1, i, &entry, 0));
		dump_bytes("raw", entry.gid.raw, 16);
		NUM(&entry, gid_index);
		NUM(&entry, port_num);
		NUM(&entry, gid_type);
		NUM(&entry, ndev_ifindex);
	}
	n = ibv_query_gid_table(ctx, table, 16, 0);
	printf("ibv_query_gid_table: %zd\n", n);
	errno = 0;
	rc = ibv_query_gid(ctx, 1, 100000, &gid);
	printf("ibv_query_gid 100000: %d\n", rc);
	for (i = 0; i < 3; i++) {
		pkey = 0;
		rc = ibv_query_pkey(ctx, 1, i, &pkey);
		printf("pkey %d: %d %#x, index %d\n", i, rc, ntohs(pkey),
		       rc ? 0 : ibv_get_pkey_index(ctx, 1, pkey));
	}
}

static void regions(struct ibv_context *ctx, struct ibv_pd *pd)
{
	static char buf[8192] __attribute__((aligned(4096)));
	struct ibv_mr *mr;
	struct ibv_mw *mw;
	int i;

	printf("pd\n");
	IS(pd, context, ctx);
	mr = MUST(ibv_reg_mr(pd, buf, sizeof(buf), IBV_ACCESS_LOCAL_WRITE));
	printf("mr\n");
	IS(mr, context, ctx);
	IS(mr, pd, pd);
	IS(mr, addr, buf);
	NUM(mr, length);
	printf("  rkey is lkey: %d, set: %d\n", mr->rkey == mr->lkey,
	       mr->lkey != 0);
	OK(ibv_dereg_mr(mr));
	mr = MUST(ibv_reg_mr_iova(pd, buf + 100, 5000, 0x10064,
				  IBV_ACCESS_REMOTE_READ));
	printf("mr with iova\n");
	IS(mr, addr, buf + 100);
	NUM(mr, length);
	OK(ibv_dereg_mr(mr));
	PRINT_REFUSAL(ibv_reg_mr(pd, NULL, 4096, 0));
	PRINT_REFUSAL(ibv_reg_mr(pd, buf, sizeof(buf), IBV_ACCESS_REMOTE_WRITE));
	errno = 0;
	mr = ibv_reg_mr(pd, buf, sizeof(buf), IBV_ACCESS_ON_DEMAND);
	printf("mr on demand: %s errno %d\n", mr ? "created" : "NULL",
	       mr ? 0 : errno);
	if (mr)
		OK(ibv_dereg_mr(mr));
	for (i = IBV_MW_TYPE_1; i <= IBV_MW_TYPE_2; i++) {
		mw = MUST(ibv_alloc_mw(pd, i));
		printf("mw\n");
		IS(mw, context, ctx);
		IS(mw, pd, pd);
		SET(mw, rkey);
		NUM(mw, type);
		OK(ibv_dealloc_mw(mw));
	}
	PRINT_REFUSAL(ibv_alloc_mw(pd, 7));
}

static void dump_cq(struct ibv_cq *cq, struct ibv_context *ctx,
		    struct ibv_comp_channel *ch, void *context)
{
	IS(cq, context, ctx);
	IS(cq, channel, ch);
	IS(cq, cq_context, context);
	NUM(cq, cqe);
	NUM(cq, comp_events_completed);
	NUM(cq, async_events_completed);
}

static void queues(struct ibv_context *ctx)
{
	struct ibv_comp_channel *ch = MUST(ibv_create_comp_channel(ctx));
	struct ibv_cq *cq;
	struct ibv_cq_ex *cqx;
	struct ibv_cq_init_attr_ex attr = {.cqe = 77, .channel = ch};
	struct ibv_modify_cq_attr moderate = {.attr_mask = IBV_CQ_ATTR_MODERATE};
	char mark;
	void *context = &mark;

	printf("channel\n");
	IS(ch, context, ctx);
	printf("  fd %d\n", ch->fd >= 0);
	NUM(ch, refcnt);
	cq = MUST(ibv_create_cq(ctx, 100, context, ch, 0));
	printf("cq\n");
	dump_cq(cq, ctx, ch, context);
	NUM(ch, refcnt);
	print_result("ibv_resize_cq", ibv_resize_cq(cq, 300));
	dump_cq(cq, ctx, ch, context);
	print_result("ibv_resize_cq 0", ibv_resize_cq(cq, 0));
	print_result("ibv_modify_cq", ibv_modify_cq(cq, &moderate));
	OK(ibv_destroy_cq(cq));
	NUM(ch, refcnt);
	attr.cq_context = context;
	attr.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_SLID;
	cqx = MUST(ibv_create_cq_ex(ctx, &attr));
	printf("cq_ex\n");
	IS(cqx, context, ctx);
	IS(cqx, channel, ch);
	IS(cqx, cq_context, context);
	NUM(cqx, cqe);
	NUM(cqx, comp_events_completed);
	NUM(cqx, async_events_completed);
	NUM(cqx, comp_mask);
	printf("  start_poll %d next_poll %d end_poll %d opcode %d vendor_err %d byte_len %d slid %d wc_flags %d\n",
	       !!cqx->start_poll, !!cqx->next_poll, !!cqx->end_poll,
	       !!cqx->read_opcode, !!cqx->read_vendor_err, !!cqx->read_byte_len,
	       !!cqx->read_slid, !!cqx->read_wc_flags);
	dump_cq(ibv_cq_ex_to_cq(cqx), ctx, ch, context);
	OK(ibv_destroy_cq(ibv_cq_ex_to_cq(cqx)));
	OK(ibv_destroy_comp_channel(ch));
	PRINT_REFUSAL(ibv_create_cq(ctx, 1 << 30, NULL, NULL, 0));
	PRINT_REFUSAL(ibv_create_cq(ctx, 10, NULL, NULL, 1000));
	attr.channel = NULL;
	attr.wc_flags = 1ULL << 50;
	PRINT_REFUSAL(ibv_create_cq_ex(ctx, &attr));
}

static void dump_cap(const struct ibv_qp_cap *c)
{
	printf("  send_wr %u recv_wr %u send_sge %u recv_sge %u inline %u\n",
	       c->max_send_wr, c->max_recv_wr, c->max_send_sge, c->max_recv_sge,
	       c->max_inline_data);
}

static void dump_ah_attr(const struct ibv_ah_attr *a)
{
	printf("  ah dlid %u sl %u bits %u rate %u global %u port %u index %u flow %u hop %u class %u\n",
	       a->dlid, a->sl, a->src_path_bits, a->static_rate, a->is_global,
	       a->port_num, a->grh.sgid_index, a->grh.flow_label,
	       a->grh.hop_limit, a->grh.traffic_class);
	dump_bytes("dgid", a->grh.dgid.raw, 16);
}

static void dump_qp(struct ibv_qp *qp, struct pair *p, struct end *e)
{
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr init;

	IS(qp, context, p->ctx);
	IS(qp, qp_context, e);
	IS(qp, pd, p->pd);
	IS(qp, send_cq, e->cq);
	IS(qp, recv_cq, e->cq);
	IS(qp, srq, e->srq);
	printf("  qp_num %s\n", qp->qp_num > 1 ? "set" : "not set");
	NUM(qp, state);
	NUM(qp, qp_type);
	NUM(qp, events_completed);
	memset(&a, 0xa5, sizeof(a));
	memset(&init, 0xa5, sizeof(init));
	print_result("  ibv_query_qp", ibv_query_qp(qp, &a, ~0u >> 6, &init));
	NUM(&a, qp_state);
	NUM(&a, cur_qp_state);
	NUM(&a, path_mtu);
	NUM(&a, path_mig_state);
	NUM(&a, qkey);
	NUM(&a, rq_psn);
	NUM(&a, sq_psn);
	printf("  dest_qp_num %s\n", a.dest_qp_num == e->peer_qpn ?
				      "peer" :
			      a.dest_qp_num ? "other" : "0");
	NUM(&a, qp_access_flags);
	dump_cap(&a.cap);
	dump_ah_attr(&a.ah_attr);
	NUM(&a, pkey_index);
	NUM(&a, alt_pkey_index);
	NUM(&a, en_sqd_async_notify);
	NUM(&a, sq_draining);
	NUM(&a, max_rd_atomic);
	NUM(&a, max_dest_rd_atomic);
	NUM(&a, min_rnr_timer);
	NUM(&a, port_num);
	NUM(&a, timeout);
	NUM(&a, retry_cnt);
	NUM(&a, rnr_retry);
	NUM(&a, alt_port_num);
	NUM(&a, alt_timeout);
	IS(&init, qp_context, e);
	IS(&init, send_cq, e->cq);
	IS(&init, recv_cq, e->cq);
	IS(&init, srq, e->srq);
	dump_cap(&init.cap);
	NUM(&init, qp_type);
	NUM(&init, sq_sig_all);
}

static void queue_pairs(struct ibv_context *ctx)
{
	static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC,
						 IBV_QPT_UD};
	static const struct ibv_qp_cap caps[] = {
		{1, 1, 1, 1, 0},    {10, 20, 3, 5, 0}, {100, 7, 1, 1, 200},
		{31, 32, 32, 32, 512}, {0, 0, 0, 0, 0}, {5, 5, 2, 1, 33}};
	union ibv_gid gid;
	size_t t, c;
	int api;

	OK(ibv_query_gid(ctx, 1, gid_index(ctx), &gid));
	for (t = 0; t < ARRAY_SIZE(types); t++) {
		for (api = POST; api <= WR; api++) {
			struct pair p;

			pair_open_on(&p, ctx,
				     (struct pair_opts){.type = types[t],
							.api = api,
							.srq = api == WR,
							.unconnected = true});
			printf("qp type %d api %d, reset\n", types[t], api);
			dump_qp(p.b.qp, &p, &p.b);
			end_connect(&p.b, &p.o, p.a.qp->qp_num, &gid);
			printf("qp type %d api %d, ready\n", types[t], api);
			dump_qp(p.b.qp, &p, &p.b);
			qp_to(p.b.qp, IBV_QPS_ERR);
			printf("qp type %d api %d, error\n", types[t], api);
			dump_qp(p.b.qp, &p, &p.b);
			end_close(&p.a);
			end_close(&p.b);
			OK(ibv_dealloc_pd(p.pd));
		}
	}
	/* The capacities that the create calls return in the attributes. */
	for (c = 0; c < ARRAY_SIZE(caps); c++) {
		struct ibv_pd *pd = MUST(ibv_alloc_pd(ctx));
		struct ibv_cq *cq = MUST(ibv_create_cq(ctx, 10, NULL, NULL, 0));
		struct ibv_qp_init_attr a = {.send_cq = cq,
					     .recv_cq = cq,
					     .cap = caps[c],
					     .qp_type = IBV_QPT_RC};
		struct ibv_qp_init_attr_ex x = {.send_cq = cq,
						.recv_cq = cq,
						.cap = caps[c],
						.qp_type = IBV_QPT_RC,
						.comp_mask = IBV_QP_INIT_ATTR_PD,
						.pd = pd};
		struct ibv_qp *qp;

		printf("caps %zu\n", c);
		qp = MUST(ibv_create_qp(pd, &a));
		dump_cap(&a.cap);
		OK(ibv_destroy_qp(qp));
		qp = MUST(ibv_create_qp_ex(ctx, &x));
		dump_cap(&x.cap);
		OK(ibv_destroy_qp(qp));
		/* Refused attributes. */
		a.cap = (struct ibv_qp_cap){1 << 30, 1, 1, 1, 0};
		PRINT_REFUSAL(ibv_create_qp(pd, &a));
		a.cap = (struct ibv_qp_cap){1, 1, 1000, 1, 0};
		PRINT_REFUSAL(ibv_create_qp(pd, &a));
		a.cap = (struct ibv_qp_cap){1, 1, 1, 1, 1 << 20};
		PRINT_REFUSAL(ibv_create_qp(pd, &a));
		a.cap = caps[c];
		a.qp_type = IBV_QPT_XRC_SEND;
		PRINT_REFUSAL(ibv_create_qp(pd, &a));
		a.recv_cq = NULL;
		PRINT_REFUSAL(ibv_create_qp(pd, &a));
		a.recv_cq = cq;
		a.qp_type = IBV_QPT_RAW_PACKET;
		PRINT_REFUSAL(ibv_create_qp(pd, &a));
		x.cap = caps[c];
		x.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
		x.send_ops_flags = IBV_QP_EX_WITH_TSO;
		PRINT_REFUSAL(ibv_create_qp_ex(ctx, &x));
		x.qp_type = IBV_QPT_UD;
		x.send_ops_flags = IBV_QP_EX_WITH_RDMA_READ;
		PRINT_REFUSAL(ibv_create_qp_ex(ctx, &x));
		x.qp_type = IBV_QPT_UC;
		PRINT_REFUSAL(ibv_create_qp_ex(ctx, &x));
		x.send_ops_flags = 0;
		x.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
		x.create_flags = IBV_QP_CREATE_SCATTER_FCS;
		PRINT_REFUSAL(ibv_create_qp_ex(ctx, &x));
		x.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_RX_HASH;
		PRINT_REFUSAL(ibv_create_qp_ex(ctx, &x));
		OK(ibv_destroy_cq(cq));
		OK(ibv_dealloc_pd(pd));
	}
}

static void modify(struct ibv_context *ctx)
{
	struct pair p;
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_RTS};

	pair_open_on(&p, ctx,
		     (struct pair_opts){.type = IBV_QPT_RC, .unconnected = true});
	print_result("reset to rts", ibv_modify_qp(p.a.qp, &a, IBV_QP_STATE));
	NUM(p.a.qp, state);
	a.qp_state = IBV_QPS_INIT;
	print_result("init without port", ibv_modify_qp(p.a.qp, &a, IBV_QP_STATE));
	a.port_num = 9;
	print_result("init with port 9",
		     ibv_modify_qp(p.a.qp, &a,
			     IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX |
				     IBV_QP_ACCESS_FLAGS));
	a.port_num = 1;
	print_result("init",
		     ibv_modify_qp(p.a.qp, &a,
			     IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX |
				     IBV_QP_ACCESS_FLAGS));
	NUM(p.a.qp, state);
	print_result("bit 30", ibv_modify_qp(p.a.qp, &a, 1 << 30));
	print_result("rate limit", ibv_modify_qp(p.a.qp, &a, IBV_QP_RATE_LIMIT));
	end_close(&p.a);
	end_close(&p.b);
	OK(ibv_dealloc_pd(p.pd));
}

static void shared(struct ibv_context *ctx, struct ibv_pd *pd)
{
	struct ibv_srq_init_attr a = {.srq_context = &a,
				      .attr = {.max_wr = 50, .max_sge = 3}};
	struct ibv_srq_init_attr_ex x = {
		.srq_context = &x,
		.attr = {.max_wr = 50, .max_sge = 3},
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
		.srq_type = IBV_SRQT_BASIC,
		.pd = pd};
	struct ibv_srq_attr got, set = {.srq_limit = 7};
	struct ibv_srq *srq;
	int i;

	for (i = 0; i < 2; i++) {
		srq = MUST(i ? ibv_create_srq_ex(ctx, &x) :
			       ibv_create_srq(pd, &a));
		printf("srq %d\n", i);
		IS(srq, context, ctx);
		IS(srq, pd, pd);
		printf("  srq_context %d\n",
		       srq->srq_context == (i ? (void *)&x : (void *)&a));
		NUM(srq, events_completed);
		printf("  got max_wr %u max_sge %u\n",
		       i ? x.attr.max_wr : a.attr.max_wr,
		       i ? x.attr.max_sge : a.attr.max_sge);
		memset(&got, 0xa5, sizeof(got));
		print_result("  ibv_query_srq", ibv_query_srq(srq, &got));
		NUM(&got, max_wr);
		NUM(&got, max_sge);
		NUM(&got, srq_limit);
		set.srq_limit = 7;
		print_result("  limit", ibv_modify_srq(srq, &set, IBV_SRQ_LIMIT));
		set.srq_limit = 1 << 30;
		print_result("  limit too big", ibv_modify_srq(srq, &set, IBV_SRQ_LIMIT));
		set.max_wr = 200;
		print_result("  resize", ibv_modify_srq(srq, &set, IBV_SRQ_MAX_WR));
		memset(&got, 0xa5, sizeof(got));
		print_result("  ibv_query_srq", ibv_query_srq(srq, &got));
		NUM(&got, max_wr);
		NUM(&got, max_sge);
		NUM(&got, srq_limit);
		OK(ibv_destroy_srq(srq));
	}
	a.attr.max_wr = 1 << 30;
	PRINT_REFUSAL(ibv_create_srq(pd, &a));
	a.attr.max_wr = 10;
	a.attr.max_sge = 1000;
	PRINT_REFUSAL(ibv_create_srq(pd, &a));
	/* Refused; the errno differs between providers. */
	x.srq_type = IBV_SRQT_TM;
	CHECK(!ibv_create_srq_ex(ctx, &x));
}

static void address(struct ibv_context *ctx, struct ibv_pd *pd)
{
	struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1};
	struct ibv_ah *ah;

	attr.grh.sgid_index = gid_index(ctx);
	OK(ibv_query_gid(ctx, 1, attr.grh.sgid_index, &attr.grh.dgid));
	ah = MUST(ibv_create_ah(pd, &attr));
	printf("ah\n");
	IS(ah, context, ctx);
	IS(ah, pd, pd);
	OK(ibv_destroy_ah(ah));
	attr.port_num = 9;
	PRINT_REFUSAL(ibv_create_ah(pd, &attr));
	attr.port_num = 1;
	attr.is_global = 0;
	PRINT_REFUSAL(ibv_create_ah(pd, &attr));
	attr.is_global = 1;
	attr.grh.sgid_index = 250;
	PRINT_REFUSAL(ibv_create_ah(pd, &attr));
}

int main(void)
{
	struct ibv_context *ctx;
	struct ibv_pd *pd;

	test_limit(60);
	ctx = open_device();
	device(ctx);
	port(ctx);
	pd = MUST(ibv_alloc_pd(ctx));
	regions(ctx, pd);
	queues(ctx);
	queue_pairs(ctx);
	modify(ctx);
	shared(ctx, pd);
	address(ctx, pd);
	OK(ibv_dealloc_pd(pd));
	print_result("ibv_close_device", ibv_close_device(ctx));
	return 0;
}
