package outfitter.flink;

import java.io.IOException;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.Map;
import java.util.Set;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.JsonNode;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;

/** One line of {@code outfitter hold}: an allocation record as on the wire, a warning, or an error. */
final class Line {

    private static final ObjectMapper MAPPER = new ObjectMapper();

    private final JsonNode node;

    private Line(JsonNode node) {
        this.node = node;
    }

    /** Read a line. What is no JSON object counts as an error with these words. */
    static Line parse(String text) {
        try {
            JsonNode node = MAPPER.readTree(text);
            if (node != null && node.isObject()) {
                return new Line(node);
            }
        } catch (IOException error) {
            // told below
        }
        return new Line(MAPPER.createObjectNode().put("type", "error").put("reason", "not a line of outfitter hold: " + text));
    }

    /** Whether the devices may be used. A superseded record only keeps them from others. */
    boolean isGrant() {
        return text("type").equals("allocation")
                && text("state").equals("allocated")
                && !text("reason_code").equals("superseded");
    }

    /** Whether the lease is in danger. */
    boolean isWarning() {
        return text("type").equals("at-risk");
    }

    /** Why there are no devices, or no devices any more. Empty if the line does not say. */
    String reason() {
        return text("reason");
    }

    /** The devices of a resource with their properties, in the order of {@code local_index}. */
    Set<DeviceInfo> devices(String resource) {
        Set<DeviceInfo> devices = new LinkedHashSet<>();
        for (JsonNode device : node.path("resources").path(resource)) {
            Map<String, String> properties = new LinkedHashMap<>();
            device.fields().forEachRemaining(field -> properties.put(field.getKey(), field.getValue().asText()));
            devices.add(new DeviceInfo(properties));
        }
        return devices;
    }

    private String text(String field) {
        return node.path(field).asText("").equals("null") ? "" : node.path(field).asText("");
    }
}
