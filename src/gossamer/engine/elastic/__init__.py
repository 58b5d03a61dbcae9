"""Elastic jobs (`on_failure="continue"`): members may die, leave, join and be replaced."""

from gossamer.engine.elastic.async_lane import ElasticAsyncLane
from gossamer.engine.elastic.coordinator import ElasticCoordinator
from gossamer.engine.elastic.gossip import ElasticGossip
from gossamer.engine.elastic.lane import ElasticLane

__all__ = ["ElasticAsyncLane", "ElasticCoordinator", "ElasticGossip", "ElasticLane"]
