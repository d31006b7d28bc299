// What the wire contract means for this worker: no Kafka in here.
package main

import (
	"cmp"
	"encoding/json"
)

type lease struct{ seconds, aliveAt float64 } // 0: none; counts from when we began to send a message

func (l lease) isLost(now float64) bool { return l.seconds > 0 && now >= l.aliveAt+l.seconds }

func (l *lease) acknowledge(sentAt, now float64) {
	if !l.isLost(now) { // else it proves nothing: somebody else may have the devices by now
		l.aliveAt = max(l.aliveAt, sentAt)
	}
}

type record struct {
	Type, State, Outcome, Reason string
	Code                         string `json:"reason_code"`
	Request                      struct {
		LeaseS  float64 `json:"lease_s"` // null: no lease
		Choices map[string]any
	}
	Resources json.RawMessage
}

var words = map[string]string{"allocated": "yours", "allocated superseded": "over", "ended": "over",
	"releasing": "over", "releasing failed": "failed", "failed": "failed"}

// What a record in our host's partition means for the worker with the key own.
func status(own, key string, value []byte) (word string, r record) {
	if value == nil && own == key { // a tombstone
		return "over", r
	} else if own != key || json.Unmarshal(value, &r) != nil || r.Type != "allocation" {
		return "skip", r // another worker's, another run's, a manager's own (@...), or of a later version
	}
	return cmp.Or(words[r.State+" "+r.Outcome], words[r.State+" "+r.Code], words[r.State], "waiting"), r
}
