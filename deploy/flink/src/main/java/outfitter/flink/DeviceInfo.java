package outfitter.flink;

import java.util.Collection;
import java.util.Collections;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
import org.apache.flink.api.common.externalresource.ExternalResourceInfo;

/** One device, with all properties that its driver in Outfitter has reported: {@code id}, {@code index}, ... */
final class DeviceInfo implements ExternalResourceInfo {

    private final Map<String, String> properties;

    DeviceInfo(Map<String, String> properties) {
        this.properties = Collections.unmodifiableMap(new TreeMap<>(properties));
    }

    @Override
    public Optional<String> getProperty(String key) {
        return Optional.ofNullable(properties.get(key));
    }

    @Override
    public Collection<String> getKeys() {
        return properties.keySet();
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof DeviceInfo && properties.equals(((DeviceInfo) other).properties);
    }

    @Override
    public int hashCode() {
        return properties.hashCode();
    }

    @Override
    public String toString() {
        return properties.toString();
    }
}
