"""The known faults. Most of them were reported by users of other engines and gateways."""

from __future__ import annotations

from collections.abc import Mapping

from tests.mutants.mutant import Mutant

_ALL = (
    Mutant(
        name="slot-of-a-running-request",
        fault="loading an adapter took the slot of an adapter that a running request used",
        path="engine/adapters/adapter_pool.py",
        changes=(
            (
                """\
            self.reclaimer.policy.discard(load)
            self._used[load.slot] = load
""",
                """\
            self._used[load.slot] = load
""",
            ),
        ),
        test="tests/simulation/test_known_faults.py::test_hot_load_does_not_take_a_running_requests_slot",
    ),
    Mutant(
        name="prefix-key-without-adapter",
        fault="cached K and V of one adapter answered requests for another (LMCache, vllm#44250)",
        path="engine/pages/prefix_cache.py",
        changes=(('adapter = b"" if digest is None else digest.encode()', 'adapter = b""'),),
        test="tests/simulation/test_known_faults.py::test_adapters_do_not_share_prefix_pages",
    ),
    Mutant(
        name="salt-collision",
        fault="the adapter's name and the cache's salt were joined without lengths",
        path="engine/pages/prefix_cache.py",
        changes=(
            ("return hashlib.sha256(_tagged(isolation_key, *self._identity)).digest()", "return isolation_key"),
            ('return b"".join([len(part).to_bytes(8, "little") + part for part in parts])', 'return b"".join(parts)'),
        ),
        test="tests/simulation/test_known_faults.py::test_adapter_name_and_owner_key_do_not_collide",
    ),
    Mutant(
        name="ranks-of-the-former-owner",
        fault="a slot kept the higher ranks of its former adapter, and read that adapter's pages",
        path="engine/adapters/slot_tables.py",
        changes=(
            ("        rank[slot] = layout.ranks\n", "        rank[slot] = np.maximum(rank[slot], layout.ranks)\n"),
        ),
        test="tests/conformance/test_known_faults.py::test_a_reused_page_keeps_nothing_of_its_former_owner",
    ),
    Mutant(
        name="unload-after-several-choices",
        fault="a request with n > 1 counted its adapter's uses too often, so an unload waited forever",
        path="engine/adapters/adapter_pool.py",
        changes=(("        load.num_users += 1\n", "        load.num_users += 2 if load.num_users else 1\n"),),
        test="tests/simulation/test_known_faults.py::test_unload_completes_after_a_request_with_several_choices",
    ),
    Mutant(
        name="state-keeps-rejected-drafts",
        fault="after a step with rejected drafts, the recurrent state of a hybrid decoder included them",
        path="engine/scheduling/scheduler.py",
        changes=(
            (
                "        has_rejected = num_accepted < sequence.num_drafted\n",
                "        has_rejected = False\n",
            ),
        ),
        test="tests/engine/loop/test_states.py::test_rejected_drafts_leave_no_trace_in_a_state",
    ),
    Mutant(
        name="rejected-drafts-are-charged",
        fault="drafts that were rejected were charged like tokens of the answer, as OpenAI does",
        path="platform/generation/choice.py",
        changes=(
            (
                "        return max(self.num_received, self.finished.completion_tokens)\n",
                "        finished = self.finished\n"
                "        rejected = finished.rejected_prediction_tokens\n"
                "        return max(self.num_received, finished.completion_tokens) + rejected\n",
            ),
        ),
        test="tests/platform/openai_api/test_predictions.py"
        "::test_usage_reports_the_prediction_and_charges_only_the_answer",
    ),
    Mutant(
        name="unload-keeps-prefixes",
        fault="after an unload, cached K and V of the adapter stayed in the pool",
        path="engine/adapters/adapter_calls.py",
        changes=(
            (
                "                self._prefixes.purge(digest)\n                answered",
                "                answered",
            ),
        ),
        test="tests/engine/pages/test_prefix_cache.py::test_prefixes_of_an_evicted_adapter_stay_valid_until_unload",
    ),
    Mutant(
        name="host-page-key-without-adapter",
        fault="K and V that one adapter had left in host memory answered requests for another (LMCache, vllm#44250)",
        path="engine/pages/prefix_cache.py",
        changes=(('adapter = b"" if digest is None else digest.encode()', 'adapter = b""'),),
        test="tests/engine/pages/test_host_pages.py::test_another_adapter_or_owner_finds_no_copies",
    ),
    Mutant(
        name="host-page-key-without-tenant",
        fault="K and V that one tenant had left in host memory answered requests of another",
        path="engine/pages/prefix_cache.py",
        changes=(("_tagged(isolation_key, *self._identity)", "_tagged(*self._identity)"),),
        test="tests/engine/pages/test_host_pages.py::test_another_adapter_or_owner_finds_no_copies",
    ),
    Mutant(
        name="purge-forgets-host-pages",
        fault="after an unload, K and V of the adapter stayed in host memory",
        path="engine/pages/prefix_cache.py",
        changes=(("        self.host.purge(digest)\n", ""),),
        test="tests/engine/pages/test_host_pages.py::test_an_unloaded_adapters_copies_are_deleted",
    ),
    Mutant(
        name="deletion-of-a-tenant-forgets-host-pages",
        fault="after the deletion of a tenant, K and V of its prompts stayed in host memory",
        path="engine/pages/prefix_cache.py",
        changes=(("        self.host.purge_owners(owners)\n", ""),),
        test="tests/engine/pages/test_host_pages.py::test_a_deleted_tenants_pages_are_deleted_everywhere",
    ),
    Mutant(
        name="broken-prefix-stays-in-host-memory",
        fault="K and V of a sequence that computed NaN stayed in host memory",
        path="engine/pages/prefix_cache.py",
        changes=(("        self.host.forget(key)\n", ""),),
        test="tests/engine/pages/test_host_pages.py::test_copies_of_a_base_that_computed_nan_are_deleted",
    ),
    Mutant(
        name="purge-forgets-disk-pages",
        fault="after an unload, K and V of the adapter stayed on disk",
        path="engine/pages/host_pages.py",
        changes=(("        self.disk.purge(digest)\n", ""),),
        test="tests/engine/pages/test_disk_pages.py::test_an_unloaded_adapters_pages_on_disk_are_erased",
    ),
    Mutant(
        name="deletion-of-a-tenant-forgets-disk-pages",
        fault="after the deletion of a tenant, K and V of its prompts stayed on disk",
        path="engine/pages/host_pages.py",
        changes=(("        self.disk.purge_owners(owners)\n", ""),),
        test="tests/engine/pages/test_disk_pages.py::test_a_deleted_tenants_pages_on_disk_are_erased",
    ),
    Mutant(
        name="broken-prefix-stays-on-disk",
        fault="K and V of a sequence that computed NaN stayed on disk",
        path="engine/pages/host_pages.py",
        changes=(("        self.disk.forget(key)\n", ""),),
        test="tests/engine/pages/test_disk_pages.py::test_pages_on_disk_of_a_base_that_computed_nan_are_erased",
    ),
    Mutant(
        name="purge-forgets-pages-on-their-way-to-disk",
        fault="K and V of a deleted tenant that were being written to disk could be found there afterwards",
        path="engine/pages/disk_pages.py",
        changes=(("        if is_done and not transfer.is_cancelled:\n", "        if is_done:\n"),),
        test="tests/engine/pages/test_disk_pages.py::test_pages_that_are_deleted_while_they_are_written_are_erased",
    ),
    Mutant(
        name="purge-forgets-pages-on-their-way-from-disk",
        fault="K and V of a deleted tenant that were being read from disk could be used afterwards",
        path="engine/pages/disk_pages.py",
        changes=(
            (
                "(*self._writing.values(), *self._reading.values()):\n            transfer.is_cancelled",
                "self._writing.values():\n            transfer.is_cancelled",
            ),
        ),
        test="tests/engine/pages/test_disk_pages.py"
        "::test_pages_whose_slots_on_disk_were_replaced_while_they_are_read_are_deleted",
    ),
    Mutant(
        name="deleted-pages-on-disk-are-not-erased",
        fault="K and V of a deleted tenant stayed in the file on disk until other pages replaced them",
        path="engine/pages/disk_pages.py",
        changes=(
            (
                "        self._num_erasing += len(pages)\n        self._slots.erase(pages)\n",
                "        self._free.extend(page.slot for page in pages)\n",
            ),
        ),
        test="tests/engine/pages/test_disk_pages.py::test_a_deleted_tenants_pages_on_disk_are_erased",
    ),
    Mutant(
        name="disk-page-key-without-tenant",
        fault="K and V that one tenant had left on disk answered requests of another",
        path="engine/pages/prefix_cache.py",
        changes=(("_tagged(isolation_key, *self._identity)", "_tagged(*self._identity)"),),
        test="tests/engine/pages/test_disk_pages.py::test_another_adapter_or_owner_finds_nothing_on_disk",
    ),
    Mutant(
        name="disk-page-key-without-adapter",
        fault="K and V that one adapter had left on disk answered requests for another",
        path="engine/pages/prefix_cache.py",
        changes=(('adapter = b"" if digest is None else digest.encode()', 'adapter = b""'),),
        test="tests/engine/pages/test_disk_pages.py::test_another_adapter_or_owner_finds_nothing_on_disk",
    ),
    Mutant(
        name="disk-checksum-without-key",
        fault="a slot on disk with another page's K and V was used",
        path="engine/pages/disk_file.py",
        changes=(("    return zlib.crc32(content, zlib.crc32(key))\n", "    return zlib.crc32(content)\n"),),
        test="tests/engine/pages/test_disk_file.py::test_a_slot_of_another_page_is_not_used",
    ),
    Mutant(
        name="end-of-a-prefix-replaces-its-beginning",
        fault="pages read from disk took the place of the beginning of the same prefix, and were then of no use",
        path="engine/pages/host_pages.py",
        changes=(("max(0, self.num_slots // MAX_SHARE - 1)", "self.num_slots"),),
        test="tests/engine/pages/test_disk_pages.py::test_the_end_of_a_prefix_does_not_replace_its_beginning",
    ),
    Mutant(
        name="deletion-of-a-tenant-on-one-server",
        fault="after the deletion of a tenant, other servers kept K and V of its prompts",
        path="admin/serving/upkeep.py",
        changes=(
            (
                "        await self._prefixes.forget(await services.call(services.accounts.tenants.deleted_keys))\n",
                "",
            ),
        ),
        test="tests/admin/rest/test_purges.py::test_every_server_deletes_the_cached_prefixes_of_deleted_tenants",
    ),
    Mutant(
        name="prefix-from-before-a-victim",
        fault="a sequence restored a page that the sequence whose slot it took had just cached",
        path="engine/scheduling/scheduler.py",
        changes=(
            (
                """\
                # The victim's pages are cached now, and may be pages that the prefix would copy from host memory.
                prefix = self._find_prefix(sequence, entry, position, budget)
""",
                "",
            ),
        ),
        test="tests/engine/pages/test_host_pages.py::test_copies_that_a_victim_offers_meanwhile_are_not_restored_again",
    ),
    Mutant(
        name="purge-forgets-host-memory",
        fault="a purge of an adapter's bytes left a copy in another tier",
        path="engine/adapters/adapter_calls.py",
        changes=(("                    self._adapters.forget_copy(digest)\n", "                    pass\n"),),
        test="tests/engine/adapters/test_adapter_calls.py"
        "::test_purge_deletes_the_copy_in_host_memory_after_the_last_request",
    ),
    Mutant(
        name="padding-of-an-earlier-step",
        fault="a replayed graph read segments that an earlier, larger step had left in its inputs",
        path="engine/execution/step_buffer.py",
        changes=(("        field[..., count:] = padding\n", ""),),
        test="tests/engine/execution/test_step_buffer.py::test_device_reads_the_batch_followed_by_padding",
    ),
    Mutant(
        name="more-segments-than-captured",
        fault="a graph was replayed with more segments than it had been captured for",
        path="engine/execution/step_buffer.py",
        changes=(
            (
                """\
        if count > field.shape[-1]:
            raise ValueError(f"{count} {name} do not fit into a step of {field.shape[-1]}")
        field[..., :count] = values
""",
                """\
        field[..., :count] = values[..., : field.shape[-1]]
""",
            ),
        ),
        test="tests/engine/execution/test_step_buffer.py::test_more_segments_than_captured_are_refused",
    ),
    Mutant(
        name="tokens-after-the-end",
        fault="a request that was aborted while its step ran still produced a token",
        path="engine/loop/step_commits.py",
        changes=(("if sequence is None or sequence.state is finished:", "if sequence is None:"),),
        test="tests/simulation/test_long_life.py::test_random_events_lose_and_leak_nothing",
    ),
    Mutant(
        name="one-nan-ends-the-batch",
        fault="one adapter whose values are not finite ended all requests of the batch",
        path="engine/execution/sampler.py",
        changes=(("if is_finite[row] else SampledToken(None)", "if all(is_finite) else SampledToken(None)"),),
        test="tests/conformance/test_known_faults.py::test_one_adapter_that_is_not_finite_poisons_nobody",
    ),
    Mutant(
        name="broken-prefix-is-cached",
        fault="K and V of an adapter that had produced NaN stayed in the prefix cache",
        path="engine/pages/kv_pages.py",
        changes=(
            ("offers = sequence.shares_prefixes and not sequence.is_tainted", "offers = sequence.shares_prefixes"),
        ),
        test="tests/engine/pages/test_kv_pages.py::test_possibly_broken_sequence_offers_nothing",
    ),
    Mutant(
        name="one-seed-for-all-choices",
        fault="all choices of a seeded request with n > 1 were equal",
        path="platform/generation/plan.py",
        changes=(("seed=sampling.seed + choice", "seed=sampling.seed"),),
        test="tests/platform/openai_api/test_completions.py::test_choices_are_ordered_and_each_prompt_is_charged_once",
    ),
    Mutant(
        name="rank-pattern-ignored",
        fault="rank_pattern was ignored (reported against several servers)",
        path="adapter_store/validation/expected_modules.py",
        changes=(("rank = ranks.value(name, trained_name, config.rank)", "rank = config.rank"),),
        test="tests/adapter_store/validation/test_real_peft.py::test_saved_adapter_packs_to_the_same_products",
    ),
    Mutant(
        name="alpha-pattern-ignored",
        fault="alpha_pattern was ignored",
        path="adapter_store/validation/expected_modules.py",
        changes=(
            (
                "scale = _scale(config, alphas.value(name, trained_name, config.alpha), rank)",
                "scale = _scale(config, config.alpha, rank)",
            ),
        ),
        test="tests/adapter_store/validation/test_real_peft.py::test_saved_adapter_packs_to_the_same_products",
    ),
    Mutant(
        name="rslora-scaled-as-plain",
        fault="adapters with use_rslora were scaled by alpha / rank",
        path="adapter_store/validation/expected_modules.py",
        changes=(("return alpha / math.sqrt(rank) if config.use_rslora else alpha / rank", "return alpha / rank"),),
        test="tests/adapter_store/validation/test_real_peft.py::test_saved_adapter_packs_to_the_same_products",
    ),
    Mutant(
        name="check-then-charge",
        fault="concurrent requests were all checked against the counters before any of them was charged",
        path="platform/admission/transaction.py",
        changes=(
            (
                "            decision = decide(bindings, self._quotas.counters, demand, self._now_us)\n",
                """\
            before = self.__dict__.setdefault("_before", dict(self._quotas.counters))
            decision = decide(bindings, before, demand, self._now_us)
""",
            ),
        ),
        test="tests/platform/admission/test_group_commit.py::test_refusal_affects_only_its_own_request",
    ),
    Mutant(
        name="lost-settlement-of-a-disconnected-client",
        fault="a client that left while its quota was reserved kept the reservation until its lease ended",
        path="platform/generation/running_requests.py",
        changes=(
            (
                """\
        except asyncio.CancelledError:
            self._settler.settle_unrun(plan.request_id, reserving)
            raise
""",
                """\
        except asyncio.CancelledError:
            raise
""",
            ),
        ),
        test="tests/platform/generation/test_trouble.py::test_reservation_of_a_client_that_left_is_released",
    ),
    Mutant(
        name="concurrency-leaks",
        fault="a request that ended before it ran kept its place under a limit of concurrent requests",
        path="platform/quotas/rules.py",
        changes=(
            (
                """\
        if self.metric.kind is Kind.CONCURRENCY:
            return counter.changed(reserved=-held)
""",
                """\
        if self.metric.kind is Kind.CONCURRENCY:
            return counter.changed(reserved=-held) if spent.has_run else counter
""",
            ),
        ),
        test="tests/platform/admission/test_admission.py::test_request_that_never_ran_gives_its_place_back",
    ),
    Mutant(
        name="refusal-charges-other-policies",
        fault="a request that one limit refused was charged to another",
        path="platform/admission/transaction.py",
        changes=(
            (
                "            self._note_step_back(bindings)\n            raise\n",
                """\
            for binding in bindings:
                counter = binding.current(self._quotas.counters.get(binding.key), self._now_us)
                self._quotas.change(binding.key, binding.take(counter, demand.amounts[binding.metric.unit]))
            raise
""",
            ),
        ),
        test="tests/platform/admission/test_admission.py::test_refused_request_charges_no_policy",
    ),
    Mutant(
        name="revoked-key-in-the-cache",
        fault="a revoked key stayed valid on the server that had revoked it, until its cache entry expired",
        path="platform/accounts/api_keys.py",
        changes=(
            (
                """\
        self._cache.forget(key_id)
        return key_of(row) if row is not None else None
""",
                """\
        return key_of(row) if row is not None else None
""",
            ),
        ),
        test="tests/platform/accounts/test_api_keys.py"
        "::test_revoked_key_stops_at_once_here_and_within_five_seconds_elsewhere",
    ),
    Mutant(
        name="key-of-a-suspended-tenant",
        fault="keys of suspended tenants still worked",
        path="platform/accounts/api_keys.py",
        changes=(('return row.revoked_us is None and row.state in (None, "active")', "return row.revoked_us is None"),),
        test="tests/platform/accounts/test_api_keys.py::test_suspended_tenants_key_is_rejected_within_five_seconds",
    ),
    Mutant(
        name="budgets-skip-a-surface",
        fault="budgets did not count Responses and Messages (litellm#38176), here embeddings",
        path="platform/admission/transaction.py",
        changes=(
            (
                "        decision = self._admit(self._bindings[_caller(request)], demand)\n",
                """\
        bindings = () if request.endpoint == "embeddings" else self._bindings[_caller(request)]
        decision = self._admit(bindings, demand)
""",
            ),
        ),
        test="tests/platform/pooling_api/test_embeddings.py::test_a_quota_counts_prompt_tokens_and_is_never_passed",
    ),
    Mutant(
        name="cached-tokens-billed-twice",
        fault="cached tokens were charged at the price of prompt tokens and again at their own",
        path="platform/ledger/prices.py",
        changes=(("total = (prompt - cached) * price.prompt_nanos", "total = prompt * price.prompt_nanos"),),
        test="tests/platform/ledger/test_prices.py::test_million_tokens_cost_the_list_price",
    ),
    Mutant(
        name="abandoned-stream-is-free",
        fault="the usage of a stream was counted only if its client read it to the end",
        path="platform/generation/generation.py",
        changes=(
            (
                "completion_tokens=sum(choice.completion_tokens for choice in choices),",
                "completion_tokens=0 if self.is_abandoned else sum(choice.completion_tokens for choice in choices),",
            ),
        ),
        test="tests/platform/generation/test_trouble.py::test_disconnected_client_pays_for_committed_tokens",
    ),
    Mutant(
        name="prompt-billed-per-choice",
        fault="a request with n > 1 paid for its prompt n times",
        path="platform/generation/generation.py",
        changes=(
            (
                "prompt_tokens=sum(max(choice.prompt_tokens for choice in group) for group in groups),",
                "prompt_tokens=sum(choice.prompt_tokens for choice in choices),",
            ),
        ),
        test="tests/platform/openai_api/test_completions.py::test_choices_are_ordered_and_each_prompt_is_charged_once",
    ),
    Mutant(
        name="slow-gateway-is-recovered",
        fault="a request whose server was only slow was settled as lost, and then again",
        path="platform/admission/transaction.py",
        changes=(
            ("if closing.is_recovery and closing.lease_expires_us != reservation.lease_expires_us:", "if False:"),
        ),
        test="tests/platform/admission/test_settlement_races.py::test_request_whose_server_was_only_slow_is_not_recovered",
    ),
    Mutant(
        name="corrected-twice",
        fault="a late settlement of a recovered request was added to the ledger each time it was sent",
        path="platform/admission/transaction.py",
        changes=(
            (
                """\
        self._reservations.settle(closing.request_id)
        self._entries.correct(reservation, charged, truth)
""",
                """\
        self._entries.correct(reservation, charged, truth)
""",
            ),
        ),
        test="tests/platform/admission/test_admission.py::test_expired_reservation_is_recovered_then_corrected_once",
    ),
    Mutant(
        name="another-tenants-policy-is-named",
        fault="a refusal named the policy of another tenant",
        path="platform/quotas/decisions.py",
        changes=(
            (
                "return {} if binding.is_anothers else {POLICY_HEADER: binding.policy.id}",
                "return {POLICY_HEADER: binding.policy.id}",
            ),
        ),
        test="tests/platform/quotas/test_granted_quotas.py::test_refusal_hides_the_owners_policy_from_a_grantee",
    ),
)

MUTANTS: Mapping[str, Mutant] = {mutant.name: mutant for mutant in _ALL}
assert len(MUTANTS) == len(_ALL)
